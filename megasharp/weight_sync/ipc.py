"""Weights to engines on the learner's own devices, through handles of its memory: nothing is copied between devices.

A handle is made and opened on one device and only its text travels, so this works on several nodes too. On a CPU
handles are of files in /dev/shm. Not measured on a GPU.

`SharedHandles` is the driver's half; `share` runs in every rank of the learner and tries two ways:

- In place (`Lender`): engines copy the weights out of the parameters' own memory. That is one copy, and nothing is
  gathered, converted or flattened. It is possible where each engine's rank needs only what the learner's rank on its
  device holds: with the learner's own tensor parallelism or none, without stages and adapters. Engines learn once
  where everything is, get handles again when the memory has moved, and otherwise only copy when asked.
- In buckets, for all other engines. All ranks hold each bucket at the same time, whole, on their devices: those of its
  pipeline stage have gathered it, the others get it from the stage's source. Each shares it with the ranks of engines
  on its device; rank 0 posts the requests.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import Entry, Header, name_of, new_stamp, unflattened
from megasharp.rollout.sglang.client.api import EngineApi
from megasharp.rollout.sglang.shared_weights import (
    NOT_HELD,
    NOT_OPEN,
    Handle,
    Loan,
    Memory,
    Piece,
    handle_of,
    memory_to_json,
)
from megasharp.weight_sync.broadcast import Sent
from megasharp.weight_sync.buckets import (
    Bucket,
    BucketMemory,
    Digests,
    LendingPart,
    RankPart,
    bucket_memory,
    buckets,
    in_dtype,
    only,
    ranked,
    stage_of,
)
from megasharp.weight_sync.colocation import SharePlan, Texts, on_all, tell
from megasharp.weight_sync.endpoints import WeightSource, prefixed
from megasharp.weight_sync.receivers import Receivers


class SharedHandles:
    """Satisfies `Transport`. Both networks must be `RankedSource`s over the same ranks.

    One of these ranks must be beside each rank of each engine; `SharePlan` says what `beside` holds.
    """

    def __init__(
        self, receivers: Receivers, config: SyncConfig, dtype: torch.dtype, beside: tuple[tuple[int, ...], ...]
    ) -> None:
        self._receivers = receivers
        self._config = config
        self._dtype = dtype
        self._beside = beside

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything. Raises UserError when no engine is left."""
        stamp, digests = new_stamp(version, memory_version), Digests(self._config.verify)
        try:
            self._receivers.start()
            for prefix, part in ranked(source, memory):
                there = {member.process.index: member for member in self._receivers.alive()}
                plan = SharePlan(
                    stamp=stamp,
                    prefix=prefix,
                    dtype=self._dtype,
                    config=self._config,
                    engines=tuple((number, member.process.api) for number, member in there.items()),
                    tp=self._receivers.tp,
                    beside=self._beside,
                )
                sent = only(part.call(share, plan))
                for number, failure in sent.failures.items():
                    reason = there[number].process.exit_reason() or failure.reason
                    self._receivers.lose(there[number], f"load of weights: {reason}")
                digests.by_name |= sent.digests
            self._receivers.end(stamp)
            self._receivers.compare(digests)
            self._receivers.go_on()
        except BaseException:
            self._receivers.release()
            raise


def share(part: RankPart, plan: SharePlan) -> Sent | None:
    """Share all weights with the engines; None on all ranks but the first.

    An engine that fails gets no more; the others get all.
    """
    sent, digests = Sent(), Digests(plan.config.verify)
    left = lend(part, plan, sent)
    if left:
        _share_buckets(part, plan, left, sent, digests)
    elif plan.config.verify:
        # Checksums of the exported weights in the engines' dtype; without pipeline stages the source is rank 0.
        for item in in_dtype(prefixed(part.export_weights(everywhere=True), plan.prefix), plan.dtype):
            if dist.get_rank() == 0:
                digests.of([item])
    sent.digests = digests.by_name
    return sent if dist.get_rank() == 0 else None


def _share_buckets(part: RankPart, plan: SharePlan, numbers: tuple[int, ...], sent: Sent, digests: Digests) -> None:
    """All weights to the engines of these numbers, one bucket after another."""
    world = dist.get_world_size()
    found: list[int | None] = [stage_of(part)] * world
    if world > 1:
        dist.all_gather_object(found, stage_of(part))
    sources = {stage: rank for rank, stage in enumerate(found) if stage is not None}
    seats = plan.seats(dist.get_rank(), world)
    with bucket_memory(part.device, plan.config.bucket_mb) as room:
        for stage in sorted(sources):
            for entries, flat in _held(part, plan, stage, sources, room):
                if dist.get_rank() == 0:
                    digests.of(list(unflattened(entries, flat)))
                header = Header(plan.stamp, entries).to_json()
                texts = {seat: [("header", header), ("memory", memory_to_json(room.lent(seat)))] for seat in seats}
                sent.failures |= tell(plan, texts, [number for number in numbers if number not in sent.failures])


def _held(
    part: RankPart, plan: SharePlan, stage: int, sources: dict[int, int], room: BucketMemory
) -> Iterator[tuple[tuple[Entry, ...], Tensor]]:
    """Yield each bucket of a stage, on every rank at the same time, as entries and uint8 [bytes]."""
    own = part.place.pp == stage
    gathered = prefixed(part.export_weights(everywhere=True), plan.prefix) if own else ()
    cut: Iterator[Bucket] = buckets(gathered, plan.config.bucket_mb)
    while True:
        bucket = next(cut, None)
        held = None if bucket is None else room.filled(bucket, plan.dtype)
        entries = None if held is None else held[0]
        # All ranks learn from the source what the bucket holds; None ends the stage.
        if len(sources) > 1:
            box = [entries]
            dist.broadcast_object_list(box, src=sources[stage])
            entries = box[0]
        if entries is None:
            return
        flat = room.room(entries) if held is None else held[1]
        if len(sources) > 1:
            dist.broadcast(flat, src=sources[stage])
        # Engines read in another process, whose streams know nothing of ours.
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        yield entries, flat


class Lender:
    """One rank's part of a network, shared in place, with a record of what each engine's rank knows."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._generation = 0
        self._state: object = None
        self._storages: list[torch.UntypedStorage] = []
        self._pieces: tuple[Piece, ...] = ()
        self._layout = ""
        self._known: dict[tuple[EngineApi, int], tuple[int, str]] = {}
        # Set once an engine needed what is not here: that does not change during a run.
        self.in_vain = False

    def look(self, part: LendingPart, prefix: str) -> bool:
        """Find where the weights are now; returns True where they can be shared in place."""
        if self.in_vain:
            return False
        if part.weights_state() != self._state:
            self._generation += 1
            if not self._find(part, prefix):
                self.in_vain = True
                return False
            # On a CPU they have moved into shared memory by it.
            self._state = part.weights_state()
        return True

    def loan(self, part: LendingPart, plan: SharePlan, seat: int, whole: bool) -> Loan:
        """Describe the weights to the engine's rank at this seat: all, or without `whole` what it does not know yet."""
        key, news = (plan.engine_at(seat), seat % plan.tp), (self._generation, self._layout)
        known = self._known.get(key)
        self._known[key] = news
        handles: tuple[Handle, ...] | None = None
        if whole or known is None or known[0] != self._generation or not part.weights_stay:
            handles = tuple(handle_of(storage) for storage in self._storages)
        pieces = self._pieces if whole or known is None or known[1] != self._layout else None
        memory = Memory(self._name, self._generation, part.weights_stay, handles)
        return Loan(plan.stamp, memory, self._layout, pieces)

    def _find(self, part: LendingPart, prefix: str) -> bool:
        views = part.weight_views()
        if views is None:
            return False
        # Many views share a storage, and a storage has one handle.
        storages: dict[int, torch.UntypedStorage] = {}
        for view in views:
            storage = view.values.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        numbers = {pointer: number for number, pointer in enumerate(storages)}
        self._storages = list(storages.values())
        self._pieces = tuple(
            Piece(
                prefix + view.name,
                view.dim,
                view.start,
                tuple(view.values.shape),
                name_of(view.values.dtype),
                numbers[view.values.untyped_storage().data_ptr()],
                int(view.values.storage_offset()) * view.values.itemsize,
            )
            for view in views
        )
        self._layout = hashlib.sha256(repr(self._pieces).encode()).hexdigest()[:16]
        # This moves them into shared memory; the handles that engines get are made later.
        for storage in self._storages if part.device.type == "cpu" else ():
            handle_of(storage)
        return True


_lenders: WeakKeyDictionary[RankPart, Lender] = WeakKeyDictionary()


def lend(part: RankPart, plan: SharePlan, sent: Sent) -> tuple[int, ...]:
    """Have the engines copy this network; returns, on every rank, the numbers of those that have to get buckets.

    Those that fail are in `sent` afterwards.
    """
    left = tuple(number for number, _ in plan.engines)
    lender = _lenders.setdefault(part, Lender())
    if not on_all(isinstance(part, LendingPart) and lender.look(part, plan.prefix)):
        return left
    assert isinstance(part, LendingPart)
    if part.device.type == "cuda":
        # Engines read in another process, whose streams know nothing of ours. What older handles counted goes too.
        torch.cuda.synchronize(part.device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    # First without what engines should know already; those that do not know it get everything.
    for whole in (False, True):
        texts: dict[int, Texts] = {
            seat: [("loan", lender.loan(part, plan, seat, whole).to_json())]
            for seat in plan.seats(dist.get_rank(), dist.get_world_size())
        }
        failures = tell(plan, texts, left)
        apart = tuple(number for number, failure in failures.items() if NOT_HELD in failure.reason)
        again = tuple(number for number, failure in failures.items() if NOT_OPEN in failure.reason)
        sent.failures |= {number: f for number, f in failures.items() if number not in {*apart, *again}}
        # Other ranks hold the weights of these engines: they get buckets in this push and in all later ones.
        if apart:
            lender.in_vain = True
            return (*apart, *again)
        left = again
        if not again:
            return ()
    return left
