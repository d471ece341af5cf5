"""The file in which weights travel from the trainer to an engine on the same machine.

Layout: 8 bytes, little-endian, the length of the header; the header, JSON; zeros up to a multiple of 64; the tensors'
bytes, each starting at a multiple of 64. The header:

    {"version": 12, "tensors": [{"name": "lm_head.weight", "dtype": "float32", "shape": [22, 128], "offset": 0,
                                 "nbytes": 11264, "sha256": "9f86..."}]}

`offset` counts from the first tensor's byte, `version` is the weights' version that the tensors belong to, `sha256` is
there only where the sender was asked for it. Both sides use this module, so it imports torch and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

ALIGNMENT = 64
_LENGTH_BYTES = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a bucket file; `offset` in bytes from the first tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str | None = None


def write_bucket(path: Path, version: int, tensors: Sequence[tuple[str, Tensor]], *, checksums: bool = False) -> None:
    """Write CPU tensors to the new file `path`, readable by this user only.

    Raises OSError where the file cannot be written whole (a full /dev/shm), and then leaves none behind.
    """
    raw = [_bytes_of(tensor) for _, tensor in tensors]
    entries = _entries(tensors, raw, checksums)
    header = json.dumps({"version": version, "tensors": [_as_json(entry) for entry in entries]}).encode()
    file = open(path, "xb", opener=_private)  # noqa: SIM115 (what was there before must not be removed below)
    try:
        with file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
            file.write(header)
            start = _pad(file)
            for entry, data in zip(entries, raw, strict=True):
                assert _pad(file) == start + entry.offset
                file.write(data.numpy().data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_version(path: Path) -> int:
    """The weights' version that a bucket file belongs to. Raises ValueError for a file that is no bucket."""
    return int(_header(path)[0]["version"])


def read_bucket(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a bucket file, on the CPU, over the mapped file: read before the file is removed.

    Raises ValueError for a file that is no bucket or is cut off, and for a tensor whose checksum differs.
    """
    header, start = _header(path)
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for item in header["tensors"]:
        entry = Entry(**{**item, "shape": tuple(item["shape"])})
        raw = data[start + entry.offset : start + entry.offset + entry.nbytes]
        if raw.numel() != entry.nbytes:
            raise ValueError(f"{path}: the file ends inside tensor {entry.name}")
        if entry.sha256 is not None and checksum(raw) != entry.sha256:
            raise ValueError(f"{path}: tensor {entry.name} does not have the checksum that was sent with it")
        yield entry.name, raw.view(_DTYPES[entry.dtype]).view(entry.shape)


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a CPU tensor's bytes, in hexadecimal."""
    return hashlib.sha256(_bytes_of(tensor).numpy().data).hexdigest()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [nbytes]; the same memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _entries(tensors: Sequence[tuple[str, Tensor]], raw: Sequence[Tensor], checksums: bool) -> list[Entry]:
    entries, offset = [], 0
    for (name, tensor), data in zip(tensors, raw, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype in _DTYPES, (name, dtype)
        digest = checksum(data) if checksums else None
        entries.append(Entry(name, dtype, tuple(tensor.shape), offset, data.numel(), digest))
        offset += _rounded(data.numel())
    return entries


def _as_json(entry: Entry) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(entry, name) for name in Entry.__slots__}
    if entry.sha256 is None:
        del fields["sha256"]
    return fields


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the first tensor's bytes start."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # A wrong length must not become an allocation of petabytes.
        text = file.read(min(length, path.stat().st_size))
    try:
        header = json.loads(text)
        int(header["version"]), list(header["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: this is not a file of weights") from error
    return header, _rounded(_LENGTH_BYTES + length)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> int:
    """Zeros up to the next multiple of the alignment; returns the position."""
    position = file.tell()
    file.write(bytes(_rounded(position) - position))
    return _rounded(position)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
