"""A safetensors file that is written tensor by tensor: none is kept, so a file may be larger than memory.

Format: https://github.com/huggingface/safetensors#format. The header stands before the data but is known only after it,
so room for the longest possible one is left and filled up with spaces, as the format allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_LENGTH_BYTES = 8
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
        self._file.seek(_LENGTH_BYTES + self._room)

    @property
    def names(self) -> list[str]:
        """Names of what was written so far."""
        return list(self._entries)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device."""
        whole = tensor.detach().to("cpu").contiguous()
        self._file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        end = self.nbytes + whole.nbytes
        self._entries[name] = _entry(_DTYPES[whole.dtype], tuple(whole.shape), self.nbytes, end)
        self.nbytes = end

    def finish(self) -> None:
        """Write the header and close."""
        with self._file:
            self._file.seek(0)
            self._file.write(self._room.to_bytes(_LENGTH_BYTES, "little"))
            self._file.write(_header(self._entries).ljust(self._room))

    def close(self) -> None:
        """Let go of an unfinished file; harmless after `finish`."""
        # What a full disk refused once, it refuses again.
        with suppress(OSError):
            self._file.close()


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _header(entries: Mapping[str, object]) -> bytes:
    return json.dumps({**_METADATA, **entries}, separators=(",", ":")).encode()
