"""A config.json's text, checked before transformers reads it: its own words for a wrong value name no file.

The checks are tables of keys and the values that they may have. Where transformers has a default, a key may be absent,
except for the sizes, which no two models share. Rotary settings are in `rope_parameters`, in files of older versions in
`rope_scaling`; their bounds are those of transformers' rules (modeling_rope_utils), which make the frequencies but only
warn of a value that gives none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megasharp.common.errors import UserError, reason_at
from megasharp.convert.model_folder import what_it_is

SIZE = "a whole number of at least 1"


@dataclass(frozen=True, slots=True)
class Expected:
    """One check of the values of some keys; `what` describes a right value in a message."""

    keys: tuple[str, ...]
    fits: Callable[[object], bool]
    what: str
    required: bool = False

    def faults(self, values: Mapping[str, object], table: str = "") -> Iterator[str]:
        """Yield a message for each key that is wrong; `table` is the one that `values` are in, with its dot."""
        for key in self.keys:
            if key not in values and self.required:
                yield f"{table}{key} is missing: it must be {self.what}"
            elif key in values and not self.fits(values[key]):
                yield f"{table}{key}={values[key]!r} must be {self.what}"


def is_whole(value: object) -> bool:
    """Return True for a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: object) -> bool:
    """Return True for a whole number of at least 1."""
    return isinstance(value, int) and is_whole(value) and value > 0


def is_above(value: object, bound: float) -> bool:
    """Return True for a finite number above `bound`; JSON as Python reads it has NaN and Infinity too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return bound < value <= sys.float_info.max


def is_at_least(value: object, bound: float) -> bool:
    """Return True for a finite number of `bound` or more."""
    return (value == bound and not isinstance(value, bool)) or is_above(value, bound)


def or_null(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Allow null too."""
    return lambda value: value is None or fits(value)


_TABLES = ("rope_parameters", "rope_scaling")


def _is_above_0(value: object) -> bool:
    return is_above(value, 0)


# Of 1, every dimension would have one wavelength.
_THETA = Expected(("rope_theta",), lambda value: is_above(value, 1), "a number above 1, such as 10000.0")
_ROPE_EXPECTED = (
    _THETA,
    Expected(("factor",), lambda value: is_at_least(value, 1), "a number of at least 1"),
    Expected(("low_freq_factor", "high_freq_factor"), _is_above_0, "a positive number"),
    Expected(("original_max_position_embeddings",), is_size, SIZE),
    Expected(("attention_factor", "beta_fast", "beta_slow"), or_null(_is_above_0), "a positive number, or null"),
    Expected(
        ("mscale", "mscale_all_dim"), or_null(lambda value: is_at_least(value, 0)), "a number of at least 0, or null"
    ),
    Expected(("truncate",), lambda value: isinstance(value, bool), "either true or false"),
    Expected(("partial_rotary_factor",), _is_above_0, "a positive number"),
)
_NAMED = {"rope_type", "type"} | {key for expected in _ROPE_EXPECTED for key in expected.keys}


def rope_faults(raw: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each rotary setting that is wrong; the tables must be tables or null."""
    for name in _TABLES:
        settings = raw.get(name) or {}
        assert isinstance(settings, dict)
        yield from _table_faults(settings, f"{name}.")
    # Null where a table has it.
    if raw.get("rope_theta") is not None:
        yield from _THETA.faults(raw)


def _table_faults(settings: Mapping[str, object], table: str) -> Iterator[str]:
    for expected in _ROPE_EXPECTED:
        yield from expected.faults(settings, table)
    for key, value in settings.items():
        # Other versions' settings: the rules that are built do not read them.
        if key not in _NAMED and isinstance(value, str | dict):
            yield f"{table}{key}={value!r} must be a number"
    high, low = settings.get("high_freq_factor"), settings.get("low_freq_factor")
    if isinstance(high, int | float) and isinstance(low, int | float) and high <= low:
        yield f"{table}high_freq_factor={high!r} must be greater than low_freq_factor={low!r}"


ConfigText = Mapping[str, object]

_EXPECTED = (
    Expected(
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        is_size,
        SIZE,
        required=True,
    ),
    Expected(("max_position_embeddings", "original_max_position_embeddings"), is_size, SIZE),
    Expected(("num_key_value_heads", "head_dim"), or_null(is_size), f"{SIZE}, or null"),
    Expected(("sliding_window", "max_window_layers"), or_null(is_whole), "a whole number, or null"),
    # transformers takes no whole numbers here.
    Expected(
        ("rms_norm_eps",),
        lambda value: isinstance(value, float) and is_above(value, 0),
        "a positive number, such as 1e-06",
    ),
    Expected(
        ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"),
        lambda value: isinstance(value, bool),
        "either true or false",
    ),
    Expected(("hidden_act",), lambda value: isinstance(value, str), "a name, such as 'silu'"),
    Expected(
        ("rope_parameters", "rope_scaling"), lambda value: value is None or isinstance(value, dict), "a table, or null"
    ),
    Expected(
        ("layer_types",),
        lambda value: value is None or (isinstance(value, list) and all(isinstance(kind, str) for kind in value)),
        "a list of names, one for each layer",
    ),
)


def read_text(path: Path) -> ConfigText:
    """Read the file's keys, unchecked.

    Raises:
        UserError: it does not exist, or is no JSON table.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        folder = path.parent
        raise UserError(f"{path} does not exist: not a Hugging Face model folder{what_it_is(folder)}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason_at(error, path)}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a table of a model's settings")
    return raw


def architecture_name(path: Path, raw: ConfigText) -> str:
    """Return the one class that the file names.

    Raises:
        UserError: it names none, or several.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(f"{path}: architectures={names} must be a list of one name, as ['Qwen3ForCausalLM']")
    return str(names[0])


def check_values(path: Path, raw: ConfigText) -> None:
    """Refuse values of the wrong kind.

    Raises:
        UserError: names the file, the first such key and what it must be.
    """
    for fault in _faults(raw):
        raise UserError(f"{path}: {fault}")


def _faults(raw: ConfigText) -> Iterator[str]:
    for expected in _EXPECTED:
        yield from expected.faults(raw)
    yield from rope_faults(raw)
    yield from _dtype_faults(raw)
    yield from _head_faults(raw)
    kinds, layers = raw.get("layer_types"), raw["num_hidden_layers"]
    if isinstance(kinds, list) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}: it must have one for each layer"


def _dtype_faults(raw: ConfigText) -> Iterator[str]:
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if name is not None and not isinstance(name, str):
            yield f"{key}={name!r} must be a name, such as 'bfloat16', or null"
        elif name is not None and not isinstance(getattr(torch, name, None), torch.dtype):
            yield f"{key}={name} is none of torch's dtypes: name what the weights are stored in"


def _head_faults(raw: ConfigText) -> Iterator[str]:
    # transformers asks it of a Llama, whatever its head_dim is.
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    assert isinstance(hidden, int) and isinstance(heads, int)
    if raw.get("model_type") == "llama" and hidden % heads:
        yield f"num_attention_heads={heads} must divide hidden_size={hidden} in a Llama"
