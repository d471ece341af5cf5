"""A model's arguments by the names of config.json, recorded beside Megatron weights and compared when they are read.

Shapes alone do not tell a model: with another rope theta, norm epsilon or window every tensor still fits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megasharp.common.errors import (
    UserError,
    one_line,
)
from megasharp.convert.architecture import (
    Architecture,
    RopeParameters,
)

Argument = float | int | str | bool | None | list[float | int | str | None]
Arguments = dict[str, Argument]

# Written into a run's checkpoint, by `record_arguments`.
ARGUMENTS_FILE = "arguments.json"

# Fields of Architecture that config.json calls otherwise; any other field keeps its name.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "qkv_bias": "attention_bias (query, key, value)",
    "qk_norm": "qk_norm",
}
# The dtype is the weights' own matter, and the folder only serves messages.
_LEFT_OUT = ("dtype", "folder")


def model_arguments(arch: Architecture) -> Arguments:
    """All arguments of a model, flat, by config.json's names; rotary settings each by its own.

    What a model has none of is None, as an argument that an older version did not record.
    """
    found: Arguments = {}
    for field in dataclasses.fields(arch):
        value = getattr(arch, field.name)
        if field.name in _LEFT_OUT:
            continue
        if isinstance(value, RopeParameters):
            found |= _rope(value)
        else:
            found[_KEYS.get(field.name, field.name)] = list(value) or None if isinstance(value, tuple) else value
    return found


def _rope(rope: RopeParameters) -> Arguments:
    return {
        "rope_theta": rope.theta,
        "rope_type": rope.rope_type,
        **{f"rope_scaling.{key}": list(value) if isinstance(value, tuple) else value for key, value in rope.scaling},
    }


def differences(one: Mapping[str, Argument], other: Mapping[str, Argument]) -> list[tuple[str, Argument, Argument]]:
    """(key, one's value, other's value) of every argument that differs.

    None stands for one that is not given, and so does an empty list. Windows come as config.json's `sliding_window`,
    once for each pair of sizes, with the layers that have it.
    """
    keys = [*one, *(key for key in other if key not in one)]
    pairs = [(key, _given(one.get(key)), _given(other.get(key))) for key in keys]
    return [
        found
        for key, mine, theirs in pairs
        if mine != theirs
        for found in (_windows(mine, theirs) if key == "windows" else [(key, mine, theirs)])
    ]


def _given(value: Argument) -> Argument:
    return None if value == [] else value


def _windows(mine: Argument, theirs: Argument) -> list[tuple[str, Argument, Argument]]:
    """The windows that differ, by pairs; layers that only one of the models has are left to their number's own key."""
    if not all(value is None or isinstance(value, list) for value in (mine, theirs)):
        return [("windows", mine, theirs)]
    sizes = [value for value in (mine, theirs) if isinstance(value, list)]
    layers = range(min(map(len, sizes)))
    pairs = [(_window(mine, layer), _window(theirs, layer)) for layer in layers]
    return [
        (_windows_key(pair, [layer for layer in layers if pairs[layer] == pair]), *pair)
        for pair in dict.fromkeys(pairs)
        if pair[0] != pair[1]
    ]


def _window(windows: Argument, layer: int) -> Argument:
    return windows[layer] if isinstance(windows, list) else None


def _windows_key(pair: tuple[Argument, Argument], layers: Sequence[int]) -> str:
    """Whether a layer has a window at all is the matter of two keys."""
    keys = "sliding_window, layer_types" if None in pair else "sliding_window"
    return f"{keys} (layers {_ranges(layers)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short.

    Example: "0-3, 6, 8-9".
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(parts)


def check_arguments(config: Path, arch: Architecture, folder: Path, recorded: Mapping[str, Argument]) -> None:
    """Compare what a config.json says with what the weights in `folder` were recorded with.

    Raises:
        UserError: they differ; names every key with both values.
    """
    found = differences(model_arguments(arch), recorded)
    if found:
        keys = "; ".join(f"{key}={mine}, recorded {theirs}" for key, mine, theirs in found)
        raise UserError(f"{config} does not describe the weights in {folder}: {keys}: restore the model's own config")


def record_arguments(folder: Path, arch: Architecture) -> None:
    """Write what a run's checkpoint in `folder` is the weights of."""
    text = json.dumps(model_arguments(arch), indent=1)
    (folder / ARGUMENTS_FILE).write_text(text + "\n", encoding="utf-8")


def read_arguments(folder: Path) -> Arguments | None:
    """What `record_arguments` wrote; None where it did not.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / ARGUMENTS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a table of the model's arguments")
    return found
