"""The part of a step that one data-parallel rank works on, as a few flat tensors.

A `Share` holds nothing that can be computed from something else: token ids in 4 bytes, two log-probs, and small tables
of sequences. Micro-batches are views of it (`views.open_share`), which compute each of their fields where it is first
read, in the driver as on the ranks. Ranks get a share once a step; `Packed` never changes after packing, `Labels` may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megasharp.common.records import Sequence as TrainSequence
from megasharp.ops.segment import segment_broadcast
from megasharp.ops.uniform import seeds_to_int64


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A sequence with its place in the step's flat order and its group's number."""

    sequence: TrainSequence
    flat: int
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A value for each response token: `values` [T], or [S] where it is the same in all of a sequence (`constant`)."""

    values: Tensor
    constant: bool

    def of(self, sequences: slice, tokens: slice, seq_T: Tensor) -> Tensor:
        """Return the values of these tokens, [T]; `seq_T` numbers their sequences from the first of `sequences`."""
        return segment_broadcast(self.values[sequences], seq_T) if self.constant else self.values[tokens]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Everything of a share that rollouts and packing decided; sequences are in the order of packing.

    `ids`: int32, of each unit its prompt once and then all of its responses. `sampler`, `policy`: float32 log-probs.
    `units`: int64 [2, units], the prompt's length and the number of responses that share it. `sequences`: int64 [4, S],
    response length, group, place in the step's flat order, seed. `micros`: int64, the units of each micro-batch;
    `minis`: the micro-batches of each mini-batch. `row_multiple` divides the rows of a micro-batch.
    """

    ids: Tensor
    sampler: Column
    policy: Column
    units: Tensor
    sequences: Tensor
    micros: Tensor
    minis: tuple[int, ...]
    row_multiple: int

    @property
    def lengths_S(self) -> Tensor:
        """Response tokens of each sequence, int64."""
        return self.sequences[0]


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Verdicts and advantages of a share's sequences, in the order of packing.

    `scores`: float32 [4, S]: reward, correct, scored and correct responses of the group. `mask`: 0 or 1, bool where it
    is by token; `advantage`: float64.
    """

    scores: Tensor
    mask: Column
    advantage: Column


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One data-parallel rank's micro-batches of all mini-batches of a step."""

    packed: Packed
    labels: Labels

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        packed, labels = self.packed, self.labels
        tensors = [packed.ids, packed.units, packed.sequences, packed.micros, labels.scores]
        columns = [packed.sampler, packed.policy, labels.mask, labels.advantage]
        return sum(t.numel() * t.element_size() for t in (*tensors, *(column.values for column in columns)))

    def with_advantages(self, adv_T: Tensor) -> Share:
        """Return the share with other advantages, [T] in the order of packing."""
        return replace(self, labels=replace(self.labels, advantage=_by_sequence(adv_T, self.packed.lengths_S)))


# A micro-batch as planned: its units, each the responses that share one copy of a prompt.
Planned = Sequence[Sequence[Member]]


def make_share(minis: Sequence[Sequence[Planned]], row_multiple: int) -> Share:
    """Pack the micro-batches of one rank, mini-batch by mini-batch."""
    micros = list(chain.from_iterable(minis))
    units = list(chain.from_iterable(micros))
    members = list(chain.from_iterable(units))
    sequences = [member.sequence for member in members]
    lengths_S = torch.tensor([s.response_length for s in sequences], dtype=torch.int64)
    table = [[member.group for member in members], [member.flat for member in members]]
    packed = Packed(
        ids=_ids(units),
        sampler=_column([s.sampler_logp_T for s in sequences], torch.float32, lengths_S),
        policy=_column([s.policy_logp_T for s in sequences], torch.float32, lengths_S),
        units=torch.tensor(
            [[unit[0].sequence.prompt_length for unit in units], [len(unit) for unit in units]], dtype=torch.int64
        ),
        sequences=torch.stack(
            [lengths_S, *torch.tensor(table, dtype=torch.int64), seeds_to_int64([s.seed for s in sequences])]
        ),
        micros=torch.tensor([len(micro) for micro in micros], dtype=torch.int64),
        minis=tuple(len(mini) for mini in minis),
        row_multiple=row_multiple,
    )
    return Share(packed, make_labels(sequences, lengths_S))


def make_labels(sequences: Sequence[TrainSequence], lengths_S: Tensor) -> Labels:
    """Return the labels of sequences with these response lengths. Raises ValueError where a mask is not 0 or 1."""
    scores = [
        [s.reward for s in sequences],
        [float(s.correct) for s in sequences],
        [float(s.group_size) for s in sequences],
        [float(s.group_correct) for s in sequences],
    ]
    mask = _column([s.mask_T for s in sequences], torch.float32, lengths_S)
    advantage = _column([s.advantage_T for s in sequences], torch.float64, lengths_S)
    return Labels(
        scores=torch.tensor(scores, dtype=torch.float32),
        mask=_packed_mask(mask if mask.constant else _by_sequence(mask.values, lengths_S)),
        advantage=advantage if advantage.constant else _by_sequence(advantage.values, lengths_S),
    )


def _ids(units: Sequence[Sequence[Member]]) -> Tensor:
    parts = []
    for unit in units:
        # The first response stands behind the prompt already.
        parts.append(unit[0].sequence.tokens)
        prompt_length = unit[0].sequence.prompt_length
        parts.extend(member.sequence.tokens[prompt_length:] for member in unit[1:])
    ids = torch.empty(sum(part.numel() for part in parts), dtype=torch.int32)
    return torch.cat(parts, out=ids) if parts else ids


def _column(parts: Sequence[Tensor], dtype: torch.dtype, lengths_S: Tensor) -> Column:
    """Join sequences' values; one that was expanded is known to be constant without reading it."""
    if all(part.numel() <= 1 or part.stride(0) == 0 for part in parts):
        values = torch.zeros(len(parts), dtype=dtype)
        if parts:
            values[lengths_S > 0] = torch.cat([part[:1] for part in parts]).to(dtype)
        return Column(values, True)
    return Column(torch.cat(list(parts)).to(dtype), False)


def _by_sequence(value_T: Tensor, lengths_S: Tensor) -> Column:
    """Keep one value a sequence where all of its tokens have the same, bit for bit."""
    present_S = lengths_S > 0
    if value_T.dtype not in _BITS:
        return Column(value_T, False)
    bits_T = value_T.view(_BITS[value_T.dtype])
    first_S = (lengths_S.cumsum(0) - lengths_S)[present_S]
    if not torch.equal(bits_T, torch.repeat_interleave(bits_T[first_S], lengths_S[present_S])):
        return Column(value_T, False)
    values = value_T.new_zeros(lengths_S.numel())
    values[present_S] = value_T[first_S]
    return Column(values, True)


# Compared as integers, a NaN equals itself and -0.0 is not 0.0.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _packed_mask(mask: Column) -> Column:
    kept = mask.values == 1.0
    if not bool((kept | (mask.values == 0.0)).all()):
        raise ValueError("a mask is 0 or 1")
    return mask if mask.constant else Column(kept, False)
