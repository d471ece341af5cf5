"""A config.json's text, checked before transformers reads it: its own words for a wrong value name no file.

Where transformers has a default, a key may be absent, except for what no two models share: their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megasharp.convert.mistaken import what_it_is
from megasharp.errors import UserError, one_line

ConfigText = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the values of some keys must be; `what` says it in a message."""

    keys: tuple[str, ...]
    fits: Callable[[object], bool]
    what: str
    required: bool = False


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size_or_null(value: object) -> bool:
    return value is None or _is_size(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_no_text(value: object) -> bool:
    """For a setting of the rotary embedding: numbers mostly, lists of them, or switches."""
    return not isinstance(value, str | dict)


_EXPECTED = (
    _Expected(
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
        _is_size,
        "a whole number of at least 1",
        required=True,
    ),
    _Expected(("max_position_embeddings",), _is_size, "a whole number of at least 1"),
    _Expected(("num_key_value_heads", "head_dim"), _is_size_or_null, "a whole number of at least 1, or null"),
    _Expected(
        ("sliding_window", "max_window_layers"),
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
        "a whole number, or null",
    ),
    # transformers takes no whole numbers here.
    _Expected(
        ("rms_norm_eps",), lambda value: isinstance(value, float) and value > 0, "a positive number, such as 1e-06"
    ),
    _Expected(
        ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"),
        lambda value: isinstance(value, bool),
        "either true or false",
    ),
    _Expected(("hidden_act",), lambda value: isinstance(value, str), "a name, such as 'silu'"),
    _Expected(("rope_theta",), lambda value: value is None or _is_number(value), "a number"),
    _Expected(
        ("rope_parameters", "rope_scaling"), lambda value: value is None or isinstance(value, dict), "a table, or null"
    ),
    _Expected(
        ("layer_types",),
        lambda value: value is None or (isinstance(value, list) and all(isinstance(kind, str) for kind in value)),
        "a list of names, one for each layer",
    ),
)


def read_text(path: Path) -> ConfigText:
    """The file's keys, as they stand there.

    Raises:
        UserError: it does not exist, or is no JSON table.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        folder = path.parent
        raise UserError(f"{path} does not exist: not a Hugging Face model folder{what_it_is(folder)}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a table of a model's settings")
    return raw


def architecture_name(path: Path, raw: ConfigText) -> str:
    """The one class that the file names.

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
        for key in expected.keys:
            if key not in raw and expected.required:
                yield f"{key} is missing: it must be {expected.what}"
            elif key in raw and not expected.fits(raw[key]):
                yield f"{key}={raw[key]!r} must be {expected.what}"
    yield from _rope_faults(raw)
    yield from _dtype_faults(raw)
    kinds, layers = raw.get("layer_types"), raw["num_hidden_layers"]
    if isinstance(kinds, list) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}: it must have one for each layer"


def _rope_faults(raw: ConfigText) -> Iterator[str]:
    for table in ("rope_parameters", "rope_scaling"):
        settings = raw.get(table) or {}
        assert isinstance(settings, dict)
        for key, value in settings.items():
            if key not in ("rope_type", "type") and not _is_no_text(value):
                yield f"{table}.{key}={value!r} must be a number"


def _dtype_faults(raw: ConfigText) -> Iterator[str]:
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if isinstance(name, str) and not isinstance(getattr(torch, name, None), torch.dtype):
            yield f"{key}={name} is none of torch's dtypes: name what the weights are stored in"
