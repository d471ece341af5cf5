"""Weights by shared handles as the learner's ranks carry it out: every rank offers what lies on its own device.

All ranks hold each bucket at the same time, whole, on their devices: those of its pipeline stage have gathered it, the
others get it from the stage's source. Each gives handles to the ranks of engines on its device; rank 0 posts them.
Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.serving.bucket import Entry, Header, Stamp, flat_size, flattened, unflattened
from megasharp.serving.client.api import EngineApi, Refused
from megasharp.sync.broadcast_rank import Sent
from megasharp.sync.buckets import Digests, buckets, in_dtype, prefixed
from megasharp.sync.handles import handle_of
from megasharp.sync.parts import RankPart, stage_of
from megasharp.sync.posting import Posts


@dataclass(frozen=True, slots=True)
class SharePlan:
    """How one network is shared; `prefix` goes before every name.

    Rank `t` of the engine at place `e` of `engines` is on the device of learner rank `(e * tp + t) % world`: engines
    lie beside the learner's ranks in order.
    """

    stamp: Stamp
    prefix: str
    dtype: torch.dtype
    bucket_mb: int
    verify: bool
    engines: tuple[tuple[int, EngineApi], ...]
    tp: int
    limit_s: float

    def seats(self, rank: int, world: int) -> list[int]:
        """The engines' ranks, counted through, that are on this learner rank's device."""
        return [seat for seat in range(self.tp * len(self.engines)) if seat % world == rank]


def share(part: RankPart, plan: SharePlan) -> Sent | None:
    """Share all weights with the engines, one bucket after another; None on all ranks but the first.

    An engine that fails gets no more; the others get all.
    """
    world = dist.get_world_size()
    sent, digests = Sent(), Digests(plan.verify)
    found: list[int | None] = [None] * world
    dist.all_gather_object(found, stage_of(part))
    sources = {stage: rank for rank, stage in enumerate(found) if stage is not None}
    for stage in sorted(sources):
        for entries, flat in _held(part, plan, stage, sources):
            if dist.get_rank() == 0:
                digests.of(list(unflattened(entries, flat)))
            _offer(plan, Header(plan.stamp, entries), flat, sent)
    sent.digests = digests.by_name
    return sent if dist.get_rank() == 0 else None


def _held(
    part: RankPart, plan: SharePlan, stage: int, sources: dict[int, int]
) -> Iterator[tuple[tuple[Entry, ...], Tensor]]:
    """Each bucket of a stage, on every rank at the same time."""
    own = part.place.pp == stage
    gathered = in_dtype(prefixed(part.export_weights(everywhere=True), plan.prefix), plan.dtype) if own else ()
    cut = buckets(gathered, plan.bucket_mb)
    while True:
        bucket = next(cut, None)
        entries, flat = (None, torch.empty(0)) if bucket is None else flattened(bucket)
        if len(sources) > 1:
            box = [entries]
            dist.broadcast_object_list(box, src=sources[stage])
            entries = box[0]
        if entries is None:
            return
        if len(sources) > 1:
            flat = flat if own else torch.empty(flat_size(entries), dtype=torch.uint8, device=part.device)
            dist.broadcast(flat, src=sources[stage])
        yield entries, flat


def _offer(plan: SharePlan, header: Header, flat: Tensor, sent: Sent) -> None:
    """Every rank's handles of one bucket to the engines; returns when nobody reads it any more."""
    rank, world = dist.get_rank(), dist.get_world_size()
    handles = {seat: handle_of(header, flat) for seat in plan.seats(rank, world)}
    gathered: list[dict[int, str]] | None = [{} for _ in range(world)] if rank == 0 else None
    dist.gather_object(handles, gathered)
    if gathered is not None:
        by_seat = {seat: handle for each in gathered for seat, handle in each.items()}
        first = {number: place * plan.tp for place, (number, _) in enumerate(plan.engines)}

        def load(number: int, api: EngineApi) -> Refused | None:
            return api.load_handles([by_seat[first[number] + rank] for rank in range(plan.tp)], plan.limit_s)

        left = [engine for engine in plan.engines if engine[0] not in sent.failures]
        sent.failures |= Posts(left, load).failures(plan.limit_s, plan.limit_s)
    dist.barrier()
