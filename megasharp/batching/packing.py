"""Packing: sequences -> mini-batches (optimizer steps) -> data-parallel ranks -> packed micro-batches.

Responses of a group share one copy of the prompt in each micro-batch that has some of them: its rows are computed once.
A response is never split. Every rank gets the same number of micro-batches, empty ones included, because the ranks
meet in collectives. Denominators are counted here, over the whole optimizer step, before anything is split.

`planning` decides what goes where, `rows` builds the tensors, `figures` says how well it went.

A planned micro-batch as tensors: packed rows, segments, and what methods see of its response tokens.

How well a step was packed: rows that only pad, and what the largest rank has more to do than the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megasharp.batching.planning import Draft, Flops, PackLayout, Sizes, imbalance, measure, plan
from megasharp.common.records import (
    Denominators,
    Mean,
    Metrics,
    MicroBatch,
    MiniBatch,
    Segments,
    StepBatch,
    TokenInputs,
)
from megasharp.common.records import Sequence as TrainSequence
from megasharp.ops.segment import segment_broadcast, segment_sum
from megasharp.ops.uniform import CHOICE_POSITIONS, seeds_to_int64, uniforms


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A sequence with its place in the step's flat order and its group's number."""

    sequence: TrainSequence
    flat: int
    group: int


class _Rows:
    """Packed rows under construction: token ids, each run's first position, and segments."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.position: list[int] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.prefix: list[int] = []
        self.count = 0

    def add(self, tokens: Tensor, first_position: int, prefix: int) -> int:
        """Append a segment; returns its index."""
        self.tokens.append(tokens)
        self.position.append(first_position)
        self.start.append(self.count)
        self.length.append(len(tokens))
        self.prefix.append(prefix)
        self.count += len(tokens)
        return len(self.start) - 1

    def pad(self, multiple: int) -> int:
        """Fill up to a positive multiple with a segment of its own, which predicts nothing; returns its rows."""
        missing = max(multiple, math.ceil(self.count / multiple) * multiple) - self.count
        if missing:
            self.add(torch.zeros(missing, dtype=torch.int64), 0, -1)
        return missing

    def positions(self) -> Tensor:
        """Of every row: positions count up within a segment."""
        skipped = torch.tensor(self.position) - torch.tensor(self.start)
        return torch.arange(self.count) + torch.repeat_interleave(skipped, torch.tensor(self.length))

    def segments(self) -> Segments:
        """The segment table."""
        return Segments(torch.tensor(self.start), torch.tensor(self.length), torch.tensor(self.prefix))


def micro_batch(units: Sequence[Sequence[Member]], row_multiple: int) -> MicroBatch:
    """Pack `units`: the members of one share a copy of their prompt. Without any it is padding alone."""
    rows = _Rows()
    last_prompt_row: list[int] = []
    first_row: list[int] = []
    for unit in units:
        prompt_length = unit[0].sequence.prompt_length
        prompt = rows.add(unit[0].sequence.tokens[:prompt_length], 0, -1)
        last = rows.count - 1
        for member in unit:
            last_prompt_row.append(last)
            first_row.append(rows.count)
            # The last response token predicts nothing, so its row is left out.
            if member.sequence.response_length > 1:
                rows.add(member.sequence.tokens[prompt_length:-1], prompt_length, prompt)
    padding = rows.pad(row_multiple)
    members = [member for unit in units for member in unit]
    sequences = [member.sequence for member in members]
    lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.int64)
    seq_T = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    offset_T = torch.arange(seq_T.numel()) - segment_broadcast(lengths.cumsum(0) - lengths, seq_T)
    inputs = _inputs(members, seq_T, offset_T)
    return MicroBatch(
        tokens_P=torch.cat(rows.tokens),
        positions_P=rows.positions(),
        segments=rows.segments(),
        rows_T=_predicting_rows(last_prompt_row, first_row, seq_T, offset_T),
        targets_T=_cat([s.tokens[s.prompt_length :] for s in sequences], torch.int64),
        length_S=segment_sum(inputs.mask_T.double(), inputs.seq_T, len(sequences)),
        advantage_T=_cat([s.advantage_T for s in sequences], torch.float64),
        inputs=inputs,
        sequence_ids=tuple(member.flat for member in members),
        padding=padding,
    )


def _predicting_rows(
    last_prompt_row: Sequence[int], first_row: Sequence[int], seq_T: Tensor, offset_T: Tensor
) -> Tensor:
    """The row that predicts each response token: its prompt's last one, then the response's own."""
    own_T = segment_broadcast(torch.tensor(first_row, dtype=torch.int64) - 1, seq_T) + offset_T
    return torch.where(offset_T == 0, segment_broadcast(torch.tensor(last_prompt_row, dtype=torch.int64), seq_T), own_T)


def _inputs(members: Sequence[Member], seq_T: Tensor, offset_T: Tensor) -> TokenInputs:
    sequences = [member.sequence for member in members]
    seeds = seeds_to_int64([sequence.seed for sequence in sequences])

    def per_token(values: list[float]) -> Tensor:
        return segment_broadcast(torch.tensor(values, dtype=torch.float32), seq_T)

    return TokenInputs(
        mask_T=_cat([s.mask_T for s in sequences], torch.float32),
        seq_T=seq_T,
        group_T=segment_broadcast(torch.tensor([member.group for member in members], dtype=torch.int64), seq_T),
        reward_T=per_token([s.reward for s in sequences]),
        correct_T=per_token([float(s.correct) for s in sequences]),
        group_size_T=per_token([float(s.group_size) for s in sequences]),
        group_correct_T=per_token([float(s.group_correct) for s in sequences]),
        num_sequences=len(sequences),
        sampler_logp_T=_cat([s.sampler_logp_T for s in sequences], torch.float32),
        policy_logp_T=_cat([s.policy_logp_T for s in sequences], torch.float32),
        # The same however the step is packed. Sampling draws with positions from 0; these must be other numbers.
        draw_T=uniforms(segment_broadcast(seeds, seq_T), offset_T + CHOICE_POSITIONS),
    )


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


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


def packing_metrics(batch: StepBatch, flops: Flops) -> Metrics:
    """Figures of the packed rows as they are computed.

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
        "batch/padding": Mean(float(sum(m.padding for m in micros)), float(sum(m.tokens_P.numel() for m in micros))),
        "batch/imbalance": Mean(largest - mean, mean),
        "batch/micro_batches": Mean(float(sum(len(mini.per_rank[0]) for mini in batch.mini_batches)), 1.0),
    }


def rank_flops(mini: MiniBatch, flops: Flops) -> list[float]:
    """Estimated FLOPs of a forward pass on each data-parallel rank, padding included."""
    return [sum(micro_batch_flops(micro, flops) for micro in rank) for rank in mini.per_rank]


def micro_batch_flops(micro: MicroBatch, flops: Flops) -> float:
    """Estimated FLOPs of a forward pass of one micro-batch, padding included."""
    runs = micro.segments
    before = torch.where(runs.prefix >= 0, runs.length[runs.prefix.clamp(min=0)], 0)
    return float(flops.of_runs(before, runs.length).sum()) + flops.per_token * micro.targets_T.numel()
