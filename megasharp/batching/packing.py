"""Pack training sequences: mini-batches (optimizer steps) -> data-parallel ranks -> packed micro-batches as tensors.

Responses of a group share one copy of the prompt in each micro-batch that has some of them: its rows are computed once.
A response is never split. Every rank gets the same number of micro-batches, empty ones included, because the ranks
meet in collectives. Denominators are counted here, over the whole optimizer step, before anything is split.

`pack` is the entry; `planning` decides what goes where. `packing_metrics` says how well it went: the share of rows that
only pad, and how far the largest rank is above the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from megasharp.batching.planning import Flops, imbalance, measure, plan
from megasharp.batching.share import Member, Planned, make_share
from megasharp.batching.views import open_share
from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import (
    Denominators,
    Mean,
    Metrics,
    MicroBatch,
    MiniBatch,
    Routing,
    StepBatch,
    dtype_name,
)
from megasharp.common.records import Sequence as TrainSequence

# On a CPU packed rows come in steps of this many for each tensor-parallel rank: oneDNN keeps code and scratch memory
# for every matrix shape, and so there are few. Measured: with free lengths resident memory grew by 20 MB a step, with
# this by none after the first steps.
CPU_ROWS = 128
# On a GPU nothing is kept per shape. Tensor cores want multiples of 8 rows in bfloat16, and Transformer Engine refuses
# others than multiples of 16 in FP8 (of 8 in one of the two products), on each rank.
GPU_ROWS = 16

# Most micro-batches of a rank that are annotated in one piece while engines sample (`rollout.overlap_annotation`).
MICRO_BATCHES_AHEAD = 4

# Without a model: every row costs the same.
ROWS_ALONE = Flops(1.0)


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The cut of a step. Token counts include prompts; `row_multiple` is the number that divides the packed length.

    A rank's number of micro-batches is a multiple of `micro_batch_multiple`, which interleaved pipelines ask for.
    `constant` is the horizon of `token_sum_over_constant`; `share_prompts` keeps one copy of a group's prompt. `flops`
    says what rows cost, by which ranks are balanced. With `silent_apart` groups without any advantage have
    micro-batches of their own, for ranks that pass those forward alone: each rank then has its part of
    what costs a backward pass. With `routing` micro-batches say where engines sent their tokens (routing replay).
    """

    dp: int
    micro_batch_tokens: int
    mini_batches: int
    row_multiple: int
    constant: float
    share_prompts: bool = True
    micro_batch_multiple: int = 1
    flops: Flops = ROWS_ALONE
    silent_apart: bool = False
    routing: Routing | None = None


def row_multiple(layout: ParallelLayout, device: str) -> int:
    """Return the number that must divide the packed length on a device of this type ("cpu", "cuda").

    Sequence parallelism cuts the rows over `tp` ranks, context parallelism into 2 * cp pieces before that (zigzag), and
    what a rank multiplies must itself be a multiple of `CPU_ROWS` or `GPU_ROWS`, both even.
    """
    return (CPU_ROWS if device == "cpu" else GPU_ROWS) * layout.tp * layout.cp


def pack(sequences: Sequence[TrainSequence], layout: PackLayout, seed: int) -> StepBatch:
    """Pack one training step.

    `sequences` come group by group; a mini-batch is a contiguous run of groups. Fewer groups than mini-batches make
    fewer mini-batches. The batch keeps `seed`; nothing is drawn here.

    Raises:
        ValueError: there is no sequence.
        UserError: one that trains lacks the experts that the layout asks for, or has others than this model.
    """
    if layout.routing is not None:
        _check_experts(sequences, layout.routing)
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
    planned = [_planned(groups[first:last], layout) for first, last in pairwise(bounds)]
    shares = [make_share([mini[d] for mini in planned], layout.row_multiple, layout.routing) for d in range(layout.dp)]
    ranks = [open_share(share) for share in shares]
    mini_batches = []
    for per_rank in zip(*ranks, strict=True):
        micros = [micro for rank in per_rank for micro in rank]
        # Over all ranks, and by `fsum`, because the sum must not depend on the order that packing brought.
        counts = torch.cat([micro.length_S for micro in micros])
        denominators = Denominators(math.fsum(counts.tolist()), float((counts > 0).sum()), layout.constant)
        mini_batches.append(MiniBatch(per_rank, denominators))
    return StepBatch(tuple(mini_batches), group_ids, seed)


def _check_experts(sequences: Sequence[TrainSequence], routing: Routing) -> None:
    """Refuse what routing replay cannot replay; a response of which no token trains needs no experts."""
    shape = (routing.layers, routing.per_token)
    for each in sequences:
        if each.experts is None and bool(each.mask_T.any()):
            raise UserError(
                f"policy.experts.replay: no experts were recorded of response {each.index} of group {each.group_id}; "
                "sample with engines that record them, or set policy.experts.replay=false"
            )
        if each.experts is not None and (each.experts.shape[1:], each.experts.dtype) != (shape, routing.dtype):
            raise UserError(
                f"policy.experts.replay: the experts of response {each.index} of group {each.group_id} are "
                f"{list(each.experts.shape[1:])} {dtype_name(each.experts.dtype)} a token, where this model's are "
                f"{list(shape)} {dtype_name(routing.dtype)}: engines sample another model"
            )


def _planned(groups: Sequence[Sequence[Member]], layout: PackLayout) -> list[list[Planned]]:
    """Plan the micro-batches of one mini-batch, rank by rank."""
    parts: list[list[Sequence[Member]]] = [list(groups)]
    if layout.silent_apart:
        parts = [[], []]
        for group in groups:
            parts[not any(bool(member.sequence.advantage_T.any()) for member in group)].append(group)
    planned = [_planned_part(part, layout) for part in parts if part]
    return [list(chain.from_iterable(rank)) for rank in zip(*planned, strict=True)]


def _planned_part(groups: Sequence[Sequence[Member]], layout: PackLayout) -> list[list[Planned]]:
    members = [member for group in groups for member in group]
    # Where prompts are not shared, every response is a group of its own.
    units = groups if layout.share_prompts else [[member] for member in members]
    sizes = measure(
        group=[number for number, unit in enumerate(units) for _ in unit],
        prompts=[unit[0].sequence.prompt_length for unit in units],
        responses=[member.sequence.response_length for member in members],
        flops=layout.flops,
    )
    ranks = plan(sizes, layout.dp, layout.micro_batch_tokens, layout.micro_batch_multiple)
    # Groups and their responses keep the step's own order.
    return [
        [[[members[i] for i in sorted(responses)] for _, responses in sorted(draft.members.items())] for draft in rank]
        for rank in ranks
    ]


def packing_metrics(batch: StepBatch, flops: Flops) -> Metrics:
    """Return metrics of the packed rows as they are computed.

    - `batch/padding`: share of rows that are padding, over all ranks.
    - `batch/imbalance`: FLOPs of the largest data-parallel rank over the ranks' mean, minus 1. Ranks meet once for each
      optimizer step, so of several mini-batches the largest ones add up.
    - `batch/micro_batches`: micro-batches of a rank, over all optimizer steps.
    """
    micros = [micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]
    largest = mean = 0.0
    for mini in batch.mini_batches:
        loads = rank_flops(mini, flops)
        mean += sum(loads) / len(loads)
        largest += sum(loads) / len(loads) * (1.0 + imbalance(loads))
    return {
        "batch/padding": Mean(float(sum(m.padding for m in micros)), float(sum(m.rows for m in micros))),
        "batch/imbalance": Mean(largest - mean, mean),
        "batch/micro_batches": Mean(float(sum(len(mini.per_rank[0]) for mini in batch.mini_batches)), 1.0),
    }


def rank_flops(mini: MiniBatch, flops: Flops) -> list[float]:
    """Estimate the FLOPs of a forward pass on each data-parallel rank, padding included."""
    return [sum(micro_batch_flops(micro, flops) for micro in rank) for rank in mini.per_rank]


def micro_batch_flops(micro: MicroBatch, flops: Flops) -> float:
    """Estimate the FLOPs of a forward pass of one micro-batch, padding included."""
    runs = micro.segments
    before = torch.where(runs.prefix >= 0, runs.length[runs.prefix.clamp(min=0)], 0)
    return float(flops.of_runs(before, runs.length).sum()) + flops.per_token * micro.response_tokens
