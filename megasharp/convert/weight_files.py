"""Which safetensors file of a Hugging Face folder holds which tensor, and the error where a file is missing or damaged.

Formats: https://github.com/huggingface/safetensors#format, and `model.safetensors.index.json` as transformers has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megasharp.errors import UserError, one_line

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LENGTH_BYTES = 8


def weight_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor; a single file wins over an index, as in transformers.

    Raises:
        UserError: there are no weights, the single file or the index cannot be read, or a file of the index is missing.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        with open_weights(single) as handle:
            return dict.fromkeys(tensor_names(handle), single)
    if not index.is_file():
        raise UserError(_no_weights(folder))
    files = {name: folder / file for name, file in _weight_map(index).items()}
    for path, names in tensors_by_file(files).items():
        if not path.is_file():
            raise UserError(
                f"{index} names {path.name}, which does not exist, for {_first_of(names)}: complete the download"
            )
    return files


def tensors_by_file(files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """The names that each file should hold, files in the order of their names."""
    found: dict[Path, list[str]] = {path: [] for path in sorted(set(files.values()))}
    for name, path in files.items():
        found[path].append(name)
    return found


def open_weights(path: Path, expected: Sequence[str] = ()) -> safe_open:
    """Open one file, which reads its header; `expected` are tensors that an index says are in it, for the message.

    Raises:
        UserError: it may not be read, is cut short or no safetensors file; names a tensor that is lost, where one is
            known.
    """
    try:
        # Of a file that may not be read, safetensors says that it does not exist.
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        lost = _cut_off(path) or expected
        tensors = f", so {_first_of(lost)} cannot be read" if lost else ""
        raise UserError(f"{path} is truncated or not a safetensors file{tensors}: {one_line(error)}") from error


def tensor_names(handle: safe_open) -> list[str]:
    """The tensors in an open file."""
    names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
    return names


def where_looked_for(folder: Path) -> str:
    """The files that a tensor of the folder could have been in, for a message."""
    single = folder / WEIGHTS_FILE
    if single.is_file():
        return str(single)
    return f"{folder / INDEX_FILE} and the files that it names"


def _no_weights(folder: Path) -> str:
    missing = f"no safetensors weights in {folder}"
    for path in (folder / WEIGHTS_FILE, folder / INDEX_FILE):
        if path.is_symlink():
            return f"{missing}: {path.name} is a link to {path.readlink()}, which does not exist: complete the download"
    if folder.name == "hf" and (folder.parent / "policy").is_dir():
        return f"{missing}: its weights are in {folder.parent / 'policy'}: use megatron-to-hf on {folder.parent}"
    if any(folder.glob("pytorch_model*")):
        return f"{missing}, only pytorch_model files: load them with transformers and save them with save_pretrained"
    if any(folder.glob("adapter_model*")):
        return f"{missing}, only adapters: merge them into their base model with PEFT (merge_and_unload) and save that"
    return f"{missing}: expected {WEIGHTS_FILE} or {INDEX_FILE}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
        weight_map = {str(name): str(file) for name, file in raw["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {one_line(error)}") from error
    return weight_map


def _cut_off(path: Path) -> list[str]:
    """The tensors that a file's own header places behind its end; none where the header cannot be read."""
    try:
        with path.open("rb") as file:
            room = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            size = path.stat().st_size - _LENGTH_BYTES - room
            header = json.loads(file.read(room)) if size >= 0 else {}
        return [name for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"][1] > size]
    # The header is damaged too, in whatever way.
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"
