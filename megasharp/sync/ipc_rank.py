"""Weights through memory that the learner's ranks lend: where they lie, or in buckets.

Engines for which the weights do not lie right (`lend_rank.py` says when they do) get buckets. All ranks hold each
bucket at the same time, whole, on their devices: those of its pipeline stage have gathered it, the others get it from
the stage's source. Each lends it to the ranks of engines on its device; rank 0 posts what they are told.
Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.serving.bucket import Entry, Header, unflattened
from megasharp.serving.lending import memory_to_json
from megasharp.sync.broadcast_rank import Sent
from megasharp.sync.bucket_memory import BucketMemory, bucket_memory
from megasharp.sync.buckets import Bucket, Digests, buckets, in_dtype, prefixed
from megasharp.sync.lend_rank import lend
from megasharp.sync.parts import RankPart, stage_of
from megasharp.sync.seats import SharePlan, tell


def share(part: RankPart, plan: SharePlan) -> Sent | None:
    """Share all weights with the engines; None on all ranks but the first.

    An engine that fails gets no more; the others get all.
    """
    sent, digests = Sent(), Digests(plan.verify)
    left = lend(part, plan, sent)
    if left:
        _share_buckets(part, plan, left, sent, digests)
    elif plan.verify:
        # What they copied, as it would have been sent: the stage's source is the first rank, for there is one stage.
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
    with bucket_memory(part.device, plan.bucket_mb) as room:
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
    """Each bucket of a stage, on every rank at the same time."""
    own = part.place.pp == stage
    gathered = prefixed(part.export_weights(everywhere=True), plan.prefix) if own else ()
    cut: Iterator[Bucket] = buckets(gathered, plan.bucket_mb)
    while True:
        bucket = next(cut, None)
        held = None if bucket is None else room.filled(bucket, plan.dtype)
        entries = None if held is None else held[0]
        if len(sources) > 1:
            box = [entries]
            dist.broadcast_object_list(box, src=sources[stage])
            entries = box[0]
        if entries is None:
            return
        flat = room.room(entries) if held is None else held[1]
        if len(sources) > 1:
            dist.broadcast(flat, src=sources[stage])
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        yield entries, flat
