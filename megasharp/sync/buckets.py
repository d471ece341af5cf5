"""The stream of a push: tensors of policy and memory network, in the engines' dtype, cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from megasharp.protocols import MEMORY_PREFIX, NamedTensors, WeightSource
from megasharp.serving.bucket import TIED_HEAD
from megasharp.serving.checksum import checksum

Bucket = list[tuple[str, Tensor]]
_MIB = 1 << 20


class Digests:
    """Checksums of every tensor that a push sends, by its name; of none where they are not wanted."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self.by_name: dict[str, str] = {}

    def of(self, bucket: Bucket) -> list[str] | None:
        """The digests of the bucket's tensors, in order; None where none are wanted."""
        if not self._wanted:
            return None
        found = [checksum(tensor) for _, tensor in bucket]
        self.by_name |= {name: digest for (name, _), digest in zip(bucket, found, strict=True)}
        return found


def joined(source: WeightSource, memory: WeightSource | None) -> NamedTensors:
    """All weights of a push: the policy's under their names, then the memory network's under `MEMORY_PREFIX`.

    The memory's export starts with the first tensor asked for: not before the policy's has ended.
    """
    if memory is None:
        return source.export_weights()
    return chain(source.export_weights(), prefixed(memory.export_weights(), MEMORY_PREFIX))


def prefixed(tensors: NamedTensors, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, with longer names."""
    for name, tensor in tensors:
        yield prefix + name, tensor


def in_dtype(tensors: NamedTensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in `dtype`, the engines' own: half the bytes, perhaps, and checksums can be compared."""
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def buckets(tensors: Iterable[tuple[str, Tensor]], limit_mb: int) -> Iterator[Bucket]:
    """The tensors in order, in lists of at most `limit_mb` MiB; a larger tensor is a list of its own."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit_mb * _MIB:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def on_cpu(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The same tensors on the CPU."""
    for name, tensor in tensors:
        yield name, tensor.cpu()


def difference(sent: dict[str, str], ranks: Sequence[dict[str, str]]) -> str | None:
    """What is wrong with the checksums that an engine's ranks answered, naming the tensor; None where nothing is.

    A tied model's spare copy of its embedding is sent, but not held.
    """
    if not ranks:
        return "it answered no checksums"
    for name, digest in sent.items():
        for number, held in enumerate(ranks):
            if name not in held and not name.endswith(TIED_HEAD):
                return f"rank {number} holds no tensor {name}"
            if held.get(name, digest) != digest:
                return f"tensor {name} on rank {number} is not what was sent: its checksum differs"
    return None
