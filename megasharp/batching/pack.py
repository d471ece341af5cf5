"""Packing: sequences -> mini-batches (optimizer steps) -> data-parallel ranks -> packed micro-batches.

Responses of a group share one copy of the prompt in each micro-batch that has some of them: its rows are computed once.
A response is never split. Every rank gets the same number of micro-batches, empty ones included, because the ranks
meet in collectives. Denominators are counted here, over the whole optimizer step, before anything is split.

`planning` decides what goes where, `rows` builds the tensors, `figures` says how well it went.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from megasharp.batching.layout import PackLayout
from megasharp.batching.planning import plan
from megasharp.batching.rows import Member, micro_batch
from megasharp.batching.sizes import Draft, Sizes, measure
from megasharp.types import Denominators, MicroBatch, MiniBatch, StepBatch
from megasharp.types import Sequence as TrainSequence

__all__ = ["PackLayout", "pack"]


def pack(sequences: Sequence[TrainSequence], layout: PackLayout, seed: int) -> StepBatch:
    """Pack one training step.

    `sequences` come group by group; a mini-batch is a contiguous run of groups. Fewer groups than mini-batches make
    fewer mini-batches. Raises ValueError without any sequence.
    """
    group_ids = tuple(dict.fromkeys(s.group_id for s in sequences))
    number = {group_id: i for i, group_id in enumerate(group_ids)}
    groups: list[list[Member]] = [[] for _ in group_ids]
    for flat, sequence in enumerate(sequences):
        group = number[sequence.group_id]
        groups[group].append(Member(sequence, flat, group))
    if not groups:
        raise ValueError("there is no sequence to pack")
    count = min(layout.mini_batches, len(groups))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    mini_batches = tuple(_mini_batch(groups[first:last], layout) for first, last in pairwise(bounds))
    return StepBatch(mini_batches, group_ids, seed)


def sizes_of(groups: Sequence[Sequence[TrainSequence]], layout: PackLayout) -> Sizes:
    """What planning knows of a mini-batch. Where prompts are not shared, every response is a group of its own."""
    if not layout.share_prompts:
        groups = [[sequence] for group in groups for sequence in group]
    return measure(
        group=[number for number, group in enumerate(groups) for _ in group],
        prompts=[group[0].prompt_length for group in groups],
        responses=[sequence.response_length for group in groups for sequence in group],
        flops=layout.flops,
    )


def _mini_batch(groups: Sequence[Sequence[Member]], layout: PackLayout) -> MiniBatch:
    members = [member for group in groups for member in group]
    sizes = sizes_of([[member.sequence for member in group] for group in groups], layout)
    ranks = plan(sizes, layout.dp, layout.micro_batch_tokens, layout.micro_batch_multiple)
    per_rank = tuple(
        tuple(micro_batch(_units(draft, members), layout.row_multiple) for draft in rank) for rank in ranks
    )
    return MiniBatch(per_rank, _denominators([micro for rank in per_rank for micro in rank], layout.constant))


def _units(draft: Draft, members: Sequence[Member]) -> list[list[Member]]:
    """Groups and their responses in the step's own order."""
    return [[members[i] for i in sorted(draft.members[group])] for group in sorted(draft.members)]


def _denominators(micros: Sequence[MicroBatch], constant: float) -> Denominators:
    """Counted over all ranks; `fsum` because sums must not depend on the order that packing brought."""
    counts = torch.cat([micro.length_S for micro in micros])
    return Denominators(tokens=math.fsum(counts.tolist()), sequences=float((counts > 0).sum()), constant=constant)
