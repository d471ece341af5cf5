"""Hugging Face checkpoint folders, written whole or not at all, one tensor in memory at a time.

A safetensors file is written tensor by tensor and none is kept, so a file may be larger than memory. Its header comes
before the data but is known only after it, so room for the longest possible one is left and filled up with spaces, as
the format allows (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import completed_folder, folder_errors
from megasharp.convert.hf_folder import DTYPES, TOKENIZER_FILES, expected_hf_shapes, read_config
from megasharp.convert.model_folder import CONFIG_FILE, INDEX_FILE, LENGTH_BYTES, WEIGHTS_FILE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# As long as an offset gets: a file of 10^15 bytes.
_LARGEST_OFFSET = 10**15
_METADATA = {"__metadata__": {"format": "pt"}}


class TensorFile:
    """An open file at `path`; `shapes` are those of all tensors that may come, of which any may be written.

    Raises OSError when the disk refuses.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        self.nbytes = 0
        self._entries: dict[str, dict[str, object]] = {}
        longest = {name: _entry("BF16", shape, _LARGEST_OFFSET, _LARGEST_OFFSET) for name, shape in shapes.items()}
        # Data begin at a multiple of eight bytes.
        self._room = -(-len(_header(longest)) // 8) * 8
        self._file: BinaryIO = path.open("wb")
        self._file.seek(LENGTH_BYTES + self._room)

    @property
    def names(self) -> list[str]:
        """The names of the tensors written so far."""
        return list(self._entries)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device."""
        whole = tensor.detach().to("cpu").contiguous()
        self._file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        end = self.nbytes + whole.nbytes
        self._entries[name] = _entry(_NAMES[whole.dtype], tuple(whole.shape), self.nbytes, end)
        self.nbytes = end

    def finish(self) -> None:
        """Write the header and close."""
        with self._file:
            self._file.seek(0)
            self._file.write(self._room.to_bytes(LENGTH_BYTES, "little"))
            self._file.write(_header(self._entries).ljust(self._room))

    def close(self) -> None:
        """Close an unfinished file; harmless after `finish`."""
        # A disk that was full during the write is full at the flush too.
        with suppress(OSError):
            self._file.close()


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _header(entries: Mapping[str, object]) -> bytes:
    return json.dumps({**_METADATA, **entries}, separators=(",", ":")).encode()


_CARRIED_FILES = (
    "generation_config.json",
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_CARRIED_FOLDERS = ("additional_chat_templates",)
MAX_SHARD_BYTES = 5 * 1024**3


def write_hf_folder(
    target: str | Path,
    source_folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` as the checkpoint folder `target`, with the config and tokenizer of `source_folder`.

    As `fill_hf_folder`; the folder appears under its name complete and on disk, or not at all.

    Raises:
        UserError: `target` exists, `source_folder` is not a supported checkpoint, or the disk refuses.
    """
    target = Path(target)
    with completed_folder(target) as folder:
        fill_hf_folder(folder, target, Path(source_folder), tensors, max_shard_bytes)


def fill_hf_folder(
    folder: Path,
    target: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint into the empty `folder`: `tensors`, and the config and tokenizer of `source`.

    `tensors` are exactly those of that folder's model, in any order and on any device; each is written when it
    arrives. config.json names the dtype written. `target` is the name that messages give the folder.

    Raises:
        UserError: `source` is not a supported checkpoint, or the disk refuses.
    """
    _, family, arch = read_config(source)
    with folder_errors(target):
        carry_over(source, folder)
        writer = _ShardWriter(folder, expected_hf_shapes(family, arch), max_shard_bytes)
    try:
        for name, tensor in tensors:
            with folder_errors(target):
                writer.add(name, tensor)
        with folder_errors(target):
            writer.finish()
    finally:
        writer.close()


class _ShardWriter:
    """Writes tensors to a file, and begins another whenever the next one would make it too large."""

    def __init__(self, folder: Path, expected: dict[str, tuple[int, ...]], max_bytes: int) -> None:
        self._folder, self._expected, self._max_bytes = folder, expected, max_bytes
        self._files = [self._new_file()]
        self._dtype = ""

    def _new_file(self, number: int = 0) -> TensorFile:
        return TensorFile(self._folder / f"part-{number}.safetensors", self._expected)

    def add(self, name: str, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        assert self._expected.get(name) == shape, f"{name} has shape {shape}"
        file = self._files[-1]
        if file.nbytes and file.nbytes + tensor.nbytes > self._max_bytes:
            file.finish()
            self._files.append(self._new_file(len(self._files)))
        del self._expected[name]
        self._files[-1].add(name, tensor)
        self._dtype = str(tensor.dtype).removeprefix("torch.")

    def finish(self) -> None:
        """Complete the last file and give all of them their names, which contain their number."""
        assert not self._expected, f"not written: {sorted(self._expected)}"
        self._files[-1].finish()
        if len(self._files) == 1:
            self._files[0].path.rename(self._folder / WEIGHTS_FILE)
        else:
            weight_map: dict[str, str] = {}
            for number, part in enumerate(self._files, start=1):
                file = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
                part.path.rename(self._folder / file)
                weight_map |= dict.fromkeys(part.names, file)
            total = sum(part.nbytes for part in self._files)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        set_dtype(self._folder / CONFIG_FILE, self._dtype)

    def close(self) -> None:
        self._files[-1].close()


def carry_over(source: Path, folder: Path) -> None:
    """Copy the description of a model besides its weights: configuration, tokenizer files, chat template.

    Raises:
        UserError: a file of `source` cannot be read, or is a link to one that does not exist.
    """
    for name in (CONFIG_FILE, *_CARRIED_FILES):
        _carry(source / name, folder / name)
    for name in _CARRIED_FOLDERS:
        for path in sorted((source / name).rglob("*")):
            _carry(path, folder / path.relative_to(source))


def _carry(path: Path, target: Path) -> None:
    if path.is_dir() or not (path.exists() or path.is_symlink()):
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {reason_at(error, path)}: complete the download or remove it"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def set_dtype(path: Path, dtype: str) -> None:
    """Make the config.json at `path` say the weights' dtype.

    transformers loads in the dtype it names, which would round weights written in a wider one.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype not in (config.get("dtype"), config.get("torch_dtype")):
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
