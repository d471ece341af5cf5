"""Tensors cut into parts of bounded size, for streams through Ray's object store. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PART_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some bytes of a tensor: uint8, contiguous. `last` marks the tensor's end; NumPy, which Ray sends uncopied."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    last: bool


def cut(tensors: Iterable[tuple[str, Tensor]], limit: int = PART_BYTES) -> Iterator[list[Part]]:
    """Lists of parts of at most `limit` bytes in all, in order; small tensors travel together.

    The bytes are copies: a tensor may change once the next list is asked for.
    """
    waiting: list[Part] = []
    room = limit
    for name, tensor in tensors:
        data = _bytes_of(tensor)
        start = 0
        while True:
            end = min(data.size, start + room)
            waiting.append(Part(name, tensor.dtype, tuple(tensor.shape), data[start:end].copy(), end == data.size))
            room -= end - start
            if room == 0:
                yield waiting
                waiting, room = [], limit
            start = end
            if end == data.size:
                break
    if waiting:
        yield waiting


class Joiner:
    """Puts one stream's parts together again."""

    def __init__(self) -> None:
        self._data: list[NDArray[np.uint8]] = []

    def add(self, parts: Iterable[Part]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is whole now, on the CPU, in memory of its own."""
        for part in parts:
            self._data.append(part.data)
            if part.last:
                whole = torch.empty(part.shape, dtype=part.dtype)
                np.concatenate(self._data, out=_bytes_of(whole))
                self._data = []
                yield part.name, whole


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A contiguous CPU tensor's own memory; of any other tensor, a copy's."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data
