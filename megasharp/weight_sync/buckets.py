"""The stream of a push: tensors of policy and memory network, in the engines' dtype, cut into buckets.

The protocols at the top are all that a push asks of a learner whose ranks send for themselves; no learner is imported.
Then come the functions that a stream passes through, the checksums that both sides compare, and `BucketMemory`: the
flat memory that a rank's buckets go through when engines read it in place (`ipc`).

That memory is reused, because new memory costs more than what is copied into it: on a CPU the kernel clears every page
first, which took 1.4 of the 1.8 seconds of a push of 1 GB. A CPU's memory is kept for the process's life, a GPU's only
for a push, because engines need the room afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from megasharp.common.records import MEMORY_PREFIX
from megasharp.convert.hf_folder import TensorView
from megasharp.rollout.sglang.bucket import TIED_HEAD, Entry, checksum, flat_size, laid_out, unflattened
from megasharp.rollout.sglang.shared_weights import Memory, handle_of
from megasharp.weight_sync.endpoints import NamedTensors, WeightSource

P = ParamSpec("P")
T = TypeVar("T")


class Place(Protocol):
    """Where a rank stands: its pipeline stage, and whether it speaks for that stage's weights."""

    @property
    def pp(self) -> int: ...

    @property
    def exports(self) -> bool: ...


class RankPart(Protocol):
    """One rank's part of a learner."""

    @property
    def place(self) -> Place: ...

    @property
    def device(self) -> torch.device: ...

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This stage's whole tensors, on the rank that exports or on every one; all of the stage iterate to the end."""
        ...


@runtime_checkable
class LendingPart(RankPart, Protocol):
    """A part whose weights other processes on the machine can read in place."""

    @property
    def weights_stay(self) -> bool:
        """True where the weights' memory stays where it is between pushes, as far as is known."""
        ...

    def weights_state(self) -> Hashable:
        """Something that differs whenever the weights' memory may have moved."""
        ...

    def weight_views(self) -> list[TensorView] | None:
        """This rank's part of the model as views of the parameters' memory; None where it has no such views."""
        ...


@runtime_checkable
class RankedSource(WeightSource, Protocol):
    """A learner over ranks."""

    def call(self, function: Callable[Concatenate[RankPart, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a module's `function(part, ...)` on every rank; results in rank order."""
        ...


def ranked(source: WeightSource, memory: WeightSource | None) -> list[tuple[str, RankedSource]]:
    """The networks of a push as such learners, each with the prefix of its names; the policy is the first."""
    named = [("", source)] if memory is None else [("", source), (MEMORY_PREFIX, memory)]
    for _, each in named:
        assert isinstance(each, RankedSource), f"{type(each).__name__} has no ranks that could send"
    return [(prefix, cast(RankedSource, each)) for prefix, each in named]


def only(answers: Sequence[T | None]) -> T:
    """The answer of the one rank that has one."""
    [answer] = [answer for answer in answers if answer is not None]
    return answer


def stage_of(part: RankPart) -> int | None:
    """The pipeline stage that a rank speaks for; None where it speaks for none."""
    return part.place.pp if part.place.exports else None


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


def in_dtype(tensors: NamedTensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Cast floating-point tensors to `dtype`, the engines' own: fewer bytes to send, and checksums can be compared."""
    for name, tensor in tensors:
        yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def buckets(tensors: Iterable[tuple[str, Tensor]], limit_mb: int) -> Iterator[Bucket]:
    """Cut the tensors, in order, into lists of at most `limit_mb` MiB; a larger tensor is a list of its own."""
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
    """Yield the same tensors, on the CPU."""
    for name, tensor in tensors:
        yield name, tensor.cpu()


def difference(sent: dict[str, str], ranks: Sequence[dict[str, str]]) -> str | None:
    """Return the first fault in the checksums that an engine's ranks answered, naming the tensor; None without one.

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
        """Tell every engine again where the memory is: it may have moved since the last push."""
        self._told.clear()

    def filled(self, bucket: Bucket, dtype: torch.dtype) -> tuple[tuple[Entry, ...], Tensor]:
        """Copy the bucket into the memory, floats in `dtype`; returns where each tensor is, and the uint8 [bytes]."""
        # On the meta device: shapes and dtypes as they are sent, without memory.
        alike = ((name, t.to("meta", dtype) if t.is_floating_point() else t.to("meta")) for name, t in bucket)
        entries = laid_out(list(alike))
        flat = self.room(entries)
        targets = [tensor for _, tensor in unflattened(entries, flat)]
        torch._foreach_copy_(targets, [tensor.detach() for _, tensor in bucket])
        return entries, flat

    def room(self, entries: Sequence[Entry]) -> Tensor:
        """The memory's first bytes, as many as these tensors need; uint8 [bytes]."""
        size = flat_size(entries)
        if self._flat.numel() < size:
            self._flat = torch.empty(max(size, self._least), dtype=torch.uint8, device=self._device)
            # A CPU's storage moves into shared memory by this, so it comes before anything is copied.
            if self._device.type == "cpu":
                handle_of(self._flat.untyped_storage())
            self._generation += 1
            self._told.clear()
        return self._flat[:size]

    def lent(self, seat: int) -> Memory:
        """Describe the memory to the engine's rank at this seat: with a handle once a push, and when it has moved."""
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
