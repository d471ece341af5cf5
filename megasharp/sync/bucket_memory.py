"""The flat memory that a rank's buckets go through, lent to engines once.

New memory costs more than what is copied into it: on a CPU the kernel clears every page first, which took 1.4 of the
1.8 seconds of a push of 1 GB. So a CPU's memory is kept for the process's life; a GPU's only for a push, after which
engines need the room.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megasharp.serving.bucket import Entry, flat_size, laid_out, unflattened
from megasharp.serving.lending import Memory, handle_of
from megasharp.sync.buckets import Bucket

_MIB = 1 << 20


class BucketMemory:
    """Memory for one bucket at a time: `least` MiB, or more where a tensor needs it."""

    def __init__(self, device: torch.device, least: int, lasting: bool) -> None:
        self._device = device
        self._least = least * _MIB
        self._lasting = lasting
        self._lender = secrets.token_hex(8)
        self._generation = 0
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        self._told: set[int] = set()

    def begin_push(self) -> None:
        """From now on every engine is told anew where the memory is: it may be another than at the last push."""
        self._told.clear()

    def filled(self, bucket: Bucket, dtype: torch.dtype) -> tuple[tuple[Entry, ...], Tensor]:
        """The bucket's tensors in the memory, in `dtype` where they are floats; and where each lies."""
        entries = laid_out([(name, _like(tensor, dtype)) for name, tensor in bucket])
        flat = self.room(entries)
        targets = [tensor for _, tensor in unflattened(entries, flat)]
        torch._foreach_copy_(targets, [tensor.detach() for _, tensor in bucket])
        return entries, flat

    def room(self, entries: Sequence[Entry]) -> Tensor:
        """The memory's first bytes, as many as these tensors need; uint8 [bytes]."""
        size = flat_size(entries)
        if self._flat.numel() < size:
            self._flat = torch.empty(max(size, self._least), dtype=torch.uint8, device=self._device)
            if self._device.type == "cpu":
                handle_of(self._flat.untyped_storage())
            self._generation += 1
            self._told.clear()
        return self._flat[:size]

    def lent(self, seat: int) -> Memory:
        """What the engine's rank at this seat is told of the memory: a handle once a push, and when it is another."""
        handles = None if seat in self._told else (handle_of(self._flat.untyped_storage()),)
        self._told.add(seat)
        return Memory(self._lender, self._generation, self._lasting, handles)


_kept: dict[torch.device, BucketMemory] = {}


@contextmanager
def bucket_memory(device: torch.device, least: int) -> Iterator[BucketMemory]:
    """Memory for the buckets of one push."""
    lasting = device.type == "cpu"
    memory = _kept.get(device) or BucketMemory(device, least, lasting)
    if lasting:
        _kept[device] = memory
    memory.begin_push()
    yield memory


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, of the shape and dtype that are sent."""
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")
