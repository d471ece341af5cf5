"""Packing: sequences -> mini-batches (optimizer steps) -> data-parallel ranks -> packed micro-batches.

Groups stay whole where they fit, so that their responses share one copy of the prompt: its rows are computed once.
A response is never split. Every rank gets the same number of micro-batches, empty ones included, because the ranks
meet in collectives. Denominators are counted here, over the whole optimizer step, before anything is split.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megasharp.ops.uniform import CHOICE_POSITIONS, seeds_to_int64, uniforms
from megasharp.types import (
    Denominators,
    MicroBatch,
    MiniBatch,
    Segments,
    StepBatch,
    TokenInputs,
)
from megasharp.types import (
    Sequence as TrainSequence,
)

# A run's packed rows come in steps of this many for each tensor-parallel rank: oneDNN keeps code and scratch memory
# per matrix shape, and so there are few. Measured: with free lengths resident memory grew by 20 MB a step, with this by
# none after the first steps.
ROW_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class PackLayout:
    """How a step is cut. Token counts include prompts; `row_multiple` is what the packed length must divide by.

    A rank's number of micro-batches is a multiple of `micro_batch_multiple`, which interleaved pipelines ask for.
    `constant` is the horizon of `token_sum_over_constant`; `share_prompts` keeps one copy of a group's prompt.
    """

    dp: int
    micro_batch_tokens: int
    mini_batches: int
    row_multiple: int
    constant: float
    share_prompts: bool = True
    micro_batch_multiple: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A sequence with its place in the step's flat order and its group's number."""

    sequence: TrainSequence
    flat: int
    group: int


# Responses that share one prompt copy.
_Unit = list[_Member]


def pack(sequences: Sequence[TrainSequence], layout: PackLayout, seed: int) -> StepBatch:
    """Pack one training step.

    `sequences` come group by group; a mini-batch is a contiguous run of groups. Fewer groups than mini-batches make
    fewer mini-batches. Raises ValueError without any sequence.
    """
    group_ids = tuple(dict.fromkeys(s.group_id for s in sequences))
    number = {group_id: i for i, group_id in enumerate(group_ids)}
    groups: list[_Unit] = [[] for _ in group_ids]
    for flat, sequence in enumerate(sequences):
        group = number[sequence.group_id]
        groups[group].append(_Member(sequence, flat, group))
    if not groups:
        raise ValueError("there is no sequence to pack")
    count = min(layout.mini_batches, len(groups))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    mini_batches = tuple(_mini_batch(groups[first:last], layout) for first, last in pairwise(bounds))
    return StepBatch(mini_batches, group_ids, seed)


def _mini_batch(groups: Sequence[_Unit], layout: PackLayout) -> MiniBatch:
    members = [member for group in groups for member in group]
    units = [unit for group in groups for unit in _units(group, layout)]
    bins = _balance(units, layout)
    per_rank = tuple(
        tuple(_micro_batch(bins[i], layout.row_multiple) for i in range(rank, len(bins), layout.dp))
        for rank in range(layout.dp)
    )
    return MiniBatch(per_rank, _denominators(members, layout.constant))


def _denominators(members: Sequence[_Member], constant: float) -> Denominators:
    counts = [float(member.sequence.mask_T.sum()) for member in members]
    return Denominators(
        tokens=math.fsum(counts), sequences=float(sum(count > 0 for count in counts)), constant=constant
    )


def _units(group: _Unit, layout: PackLayout) -> list[_Unit]:
    """Cut a group into pieces that fit the token budget, each with its own copy of the prompt."""
    if not layout.share_prompts:
        return [[member] for member in group]
    units: list[_Unit] = []
    used = 0
    for member in group:
        cost = member.sequence.response_length
        if not units or used + cost > layout.micro_batch_tokens:
            units.append([])
            used = member.sequence.prompt_length
        units[-1].append(member)
        used += cost
    return units


def _tokens(unit: _Unit) -> int:
    return unit[0].sequence.prompt_length + sum(member.sequence.response_length for member in unit)


def _balance(units: Sequence[_Unit], layout: PackLayout) -> list[list[_Unit]]:
    """Longest-first into the emptiest bin; a multiple of dp bins, more of them until every bin keeps the budget.

    A single unit over the budget is alone in its bin: a response cannot be split.
    """
    order = sorted(range(len(units)), key=lambda i: (-_tokens(units[i]), i))
    total = sum(_tokens(unit) for unit in units)
    step = layout.micro_batch_multiple
    # Where single responses are over the budget, more bins than units would only be empty.
    bins_by_tokens, bins_by_units = total / (layout.micro_batch_tokens * layout.dp), len(units) / layout.dp
    per_rank = max(1, math.ceil(min(bins_by_tokens, bins_by_units) / step)) * step
    while True:
        bins = _spread(units, order, per_rank * layout.dp)
        if all(len(bin_) <= 1 or sum(map(_tokens, bin_)) <= layout.micro_batch_tokens for bin_ in bins):
            return bins
        per_rank += step


def _spread(units: Sequence[_Unit], order: Sequence[int], count: int) -> list[list[_Unit]]:
    """Each unit, in the given order, into the emptiest of `count` bins; inside a bin the units keep their own order."""
    chosen: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for i in order:
        load, number = loads[0]
        chosen[number].append(i)
        heapq.heapreplace(loads, (load + _tokens(units[i]), number))
    return [[units[i] for i in sorted(bin_)] for bin_ in chosen]


class _Rows:
    """Packed rows under construction: token ids, positions and segments."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.prefix: list[int] = []
        self.count = 0

    def add(self, tokens: Tensor, first_position: int, prefix: int) -> int:
        """Append a segment; returns its index."""
        length = int(tokens.numel())
        self.tokens.append(tokens)
        self.positions.append(torch.arange(first_position, first_position + length))
        self.start.append(self.count)
        self.length.append(length)
        self.prefix.append(prefix)
        self.count += length
        return len(self.start) - 1

    def pad(self, multiple: int) -> None:
        """Fill up to a positive multiple with a segment of its own, which predicts nothing."""
        missing = max(multiple, math.ceil(self.count / multiple) * multiple) - self.count
        if missing:
            self.add(torch.zeros(missing, dtype=torch.int64), 0, -1)

    def segments(self) -> Segments:
        """The segment table."""
        return Segments(torch.tensor(self.start), torch.tensor(self.length), torch.tensor(self.prefix))


def _micro_batch(units: Sequence[_Unit], row_multiple: int) -> MicroBatch:
    rows = _Rows()
    predicting: list[Tensor] = []
    members: list[_Member] = []
    for unit in units:
        prompt_length = unit[0].sequence.prompt_length
        prompt = rows.add(unit[0].sequence.tokens[:prompt_length], 0, -1)
        last_prompt_row = rows.start[prompt] + prompt_length - 1
        for member in unit:
            response = member.sequence.tokens[prompt_length:]
            # The last response token predicts nothing, so its row is left out.
            first = rows.count
            if response.numel() > 1:
                rows.add(response[:-1], prompt_length, prompt)
            if response.numel() > 0:
                predicting.append(torch.cat([torch.tensor([last_prompt_row]), torch.arange(first, rows.count)]))
            members.append(member)
    rows.pad(row_multiple)
    sequences = [member.sequence for member in members]
    return MicroBatch(
        tokens_P=torch.cat(rows.tokens),
        positions_P=torch.cat(rows.positions),
        segments=rows.segments(),
        rows_T=_cat(predicting, torch.int64),
        targets_T=_cat([s.tokens[s.prompt_length :] for s in sequences], torch.int64),
        length_S=torch.tensor([float(s.mask_T.sum()) for s in sequences], dtype=torch.float64),
        advantage_T=_cat([s.advantage_T for s in sequences], torch.float64),
        inputs=_inputs(members),
        sequence_ids=tuple(member.flat for member in members),
    )


def _inputs(members: Sequence[_Member]) -> TokenInputs:
    sequences = [member.sequence for member in members]
    lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.int64)

    def per_token(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), lengths)

    return TokenInputs(
        mask_T=_cat([s.mask_T for s in sequences], torch.float32),
        seq_T=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        group_T=per_token([float(member.group) for member in members], torch.int64),
        reward_T=per_token([s.reward for s in sequences], torch.float32),
        correct_T=per_token([float(s.correct) for s in sequences], torch.float32),
        group_size_T=per_token([float(s.group_size) for s in sequences], torch.float32),
        group_correct_T=per_token([float(s.group_correct) for s in sequences], torch.float32),
        num_sequences=len(sequences),
        sampler_logp_T=_cat([s.sampler_logp_T for s in sequences], torch.float32),
        policy_logp_T=_cat([s.policy_logp_T for s in sequences], torch.float32),
        draw_T=_draws([s.seed for s in sequences], lengths),
    )


def _draws(seeds: Sequence[int], lengths: Tensor) -> Tensor:
    """A uniform number per token, the same however the step is packed."""
    seed_T = torch.repeat_interleave(seeds_to_int64(seeds), lengths)
    first_T = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    # Sampling draws with positions from 0; these must be other numbers.
    return uniforms(seed_T, torch.arange(seed_T.numel()) - first_T + CHOICE_POSITIONS)


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
