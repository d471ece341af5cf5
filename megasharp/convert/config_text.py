"""A config.json's text, checked before transformers reads it: its own words for a wrong value name no file.

Where transformers has a default, a key may be absent, except for what no two models share: their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megasharp.convert.expected import SIZE, Expected, is_above, is_size, is_whole, or_null
from megasharp.convert.mistaken import what_it_is
from megasharp.convert.rope_text import rope_faults
from megasharp.errors import UserError, one_line

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
    """transformers asks it of a Llama, whatever its head_dim is."""
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    assert isinstance(hidden, int) and isinstance(heads, int)
    if raw.get("model_type") == "llama" and hidden % heads:
        yield f"num_attention_heads={heads} must divide hidden_size={hidden} in a Llama"
