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
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megasharp.batching.planning import Draft, Flops, imbalance, measure, plan
from megasharp.common.records import (
    Denominators,
    Mean,
    Metrics,
    MicroBatch,
    MiniBatch,
    ParallelLayout,
    Segments,
    StepBatch,
    TokenInputs,
)
from megasharp.common.records import Sequence as TrainSequence
from megasharp.ops.segment import segment_broadcast, segment_sum
from megasharp.ops.uniform import CHOICE_POSITIONS, seeds_to_int64, uniforms

# On a CPU packed rows come in steps of this many for each tensor-parallel rank: oneDNN keeps code and scratch memory
# for every matrix shape, and so there are few. Measured: with free lengths resident memory grew by 20 MB a step, with
# this by none after the first steps.
CPU_ROWS = 128
# On a GPU nothing is kept per shape. Tensor cores want multiples of 8 rows in bfloat16, and Transformer Engine refuses
# others than multiples of 16 in FP8 (of 8 in one of the two products), on each rank.
GPU_ROWS = 16

# Without a model: every row costs the same.
ROWS_ALONE = Flops(1.0)


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The cut of a step. Token counts include prompts; `row_multiple` is the number that divides the packed length.

    A rank's number of micro-batches is a multiple of `micro_batch_multiple`, which interleaved pipelines ask for.
    `constant` is the horizon of `token_sum_over_constant`; `share_prompts` keeps one copy of a group's prompt. `flops`
    says what rows cost, by which ranks are balanced.
    """

    dp: int
    micro_batch_tokens: int
    mini_batches: int
    row_multiple: int
    constant: float
    share_prompts: bool = True
    micro_batch_multiple: int = 1
    flops: Flops = ROWS_ALONE


def row_multiple(layout: ParallelLayout, device: str) -> int:
    """Return the number that must divide the packed length on a device of this type ("cpu", "cuda").

    Sequence parallelism cuts the rows over `tp` ranks, context parallelism into 2 * cp pieces before that (zigzag), and
    what a rank multiplies must itself be a multiple of `CPU_ROWS` or `GPU_ROWS`, both even.
    """
    return (CPU_ROWS if device == "cpu" else GPU_ROWS) * layout.tp * layout.cp


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A sequence with its place in the step's flat order and its group's number."""

    sequence: TrainSequence
    flat: int
    group: int


def pack(sequences: Sequence[TrainSequence], layout: PackLayout, seed: int) -> StepBatch:
    """Pack one training step.

    `sequences` come group by group; a mini-batch is a contiguous run of groups. Fewer groups than mini-batches make
    fewer mini-batches. The batch keeps `seed`; nothing is drawn here. Raises ValueError without any sequence.
    """
    group_ids = tuple(dict.fromkeys(s.group_id for s in sequences))
    number = {group_id: i for i, group_id in enumerate(group_ids)}
    groups: list[list[_Member]] = [[] for _ in group_ids]
    for flat, sequence in enumerate(sequences):
        group = number[sequence.group_id]
        groups[group].append(_Member(sequence, flat, group))
    if not groups:
        raise ValueError("there is no sequence to pack")
    count = min(layout.mini_batches, len(groups))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    mini_batches = tuple(_mini_batch(groups[first:last], layout) for first, last in pairwise(bounds))
    return StepBatch(mini_batches, group_ids, seed)


def with_annotations(batch: StepBatch, annotated: StepBatch, *, old_logp: bool) -> StepBatch:
    """Return `batch` with what passes over `annotated` found: the same responses, packed alike, with other masks.

    Without `old_logp` the log-probs of the policy before the update are left out.
    """

    def filled(pair: tuple[MicroBatch, MicroBatch]) -> MicroBatch:
        micro, found = pair
        assert micro.sequence_ids == found.sequence_ids, "packing depends on lengths alone"
        x = found.inputs
        old_T = x.old_logp_T if old_logp else None
        inputs = replace(micro.inputs, old_logp_T=old_T, old_entropy_T=x.old_entropy_T, ref_logp_T=x.ref_logp_T)
        return replace(micro, inputs=inputs)

    mini_batches = []
    for mini, known in zip(batch.mini_batches, annotated.mini_batches, strict=True):
        ranks = zip(mini.per_rank, known.per_rank, strict=True)
        per_rank = tuple(tuple(map(filled, zip(*rank, strict=True))) for rank in ranks)
        mini_batches.append(replace(mini, per_rank=per_rank))
    return replace(batch, mini_batches=tuple(mini_batches))


def _mini_batch(groups: Sequence[Sequence[_Member]], layout: PackLayout) -> MiniBatch:
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

    def packed(draft: Draft) -> MicroBatch:
        # Groups and their responses keep the step's own order.
        chosen = [[members[i] for i in sorted(responses)] for _, responses in sorted(draft.members.items())]
        return _micro_batch(chosen, layout.row_multiple)

    per_rank = tuple(tuple(packed(draft) for draft in rank) for rank in ranks)
    # Over all ranks, and by `fsum`, because the sum must not depend on the order that packing brought.
    counts = torch.cat([micro.length_S for rank in per_rank for micro in rank])
    tokens, trained = math.fsum(counts.tolist()), float((counts > 0).sum())
    return MiniBatch(per_rank, Denominators(tokens=tokens, sequences=trained, constant=layout.constant))


def _micro_batch(units: Sequence[Sequence[_Member]], row_multiple: int) -> MicroBatch:
    """Pack `units`: the members of one share a copy of their prompt. Without any, the micro-batch is padding alone."""
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
    inputs = _token_inputs(members, seq_T, offset_T)
    # A response's first token is predicted by its prompt's last row, each further one by the row of the token before.
    prompt_T = segment_broadcast(torch.tensor(last_prompt_row, dtype=torch.int64), seq_T)
    own_T = segment_broadcast(torch.tensor(first_row, dtype=torch.int64) - 1, seq_T) + offset_T
    return MicroBatch(
        tokens_P=torch.cat(rows.tokens),
        positions_P=rows.positions(),
        segments=rows.segments(),
        rows_T=torch.where(offset_T == 0, prompt_T, own_T),
        targets_T=_cat([s.tokens[s.prompt_length :] for s in sequences], torch.int64),
        length_S=segment_sum(inputs.mask_T.double(), inputs.seq_T, len(sequences)),
        advantage_T=_cat([s.advantage_T for s in sequences], torch.float64),
        inputs=inputs,
        sequence_ids=tuple(member.flat for member in members),
        padding=padding,
    )


def _token_inputs(members: Sequence[_Member], seq_T: Tensor, offset_T: Tensor) -> TokenInputs:
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
        """Append a segment behind the one numbered `prefix` (-1: none); returns its index."""
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
        """Return every row's position, int64 [P]: they count up within a segment."""
        skipped = torch.tensor(self.position) - torch.tensor(self.start)
        return torch.arange(self.count) + torch.repeat_interleave(skipped, torch.tensor(self.length))

    def segments(self) -> Segments:
        """Return the segment table."""
        return Segments(torch.tensor(self.start), torch.tensor(self.length), torch.tensor(self.prefix))


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
        "batch/padding": Mean(float(sum(m.padding for m in micros)), float(sum(m.tokens_P.numel() for m in micros))),
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
    return float(flops.of_runs(before, runs.length).sum()) + flops.per_token * micro.targets_T.numel()
