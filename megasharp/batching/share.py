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

from megasharp.common.records import Routing
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
    `minis`: the micro-batches of each mini-batch. `row_multiple` divides the rows of a micro-batch. `experts`: those of
    `ids`, [ids, layers, experts per token], of `routing`'s sizes; both None without routing replay.
    """

    ids: Tensor
    sampler: Column
    policy: Column
    units: Tensor
    sequences: Tensor
    micros: Tensor
    minis: tuple[int, ...]
    row_multiple: int
    experts: Tensor | None = None
    routing: Routing | None = None

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
        tensors += [] if packed.experts is None else [packed.experts]
        columns = [packed.sampler, packed.policy, labels.mask, labels.advantage]
        return sum(t.numel() * t.element_size() for t in (*tensors, *(column.values for column in columns)))

    def with_advantages(self, adv_T: Tensor) -> Share:
        """Return the share with other advantages, [T] in the order of packing."""
        lengths_S = self.packed.lengths_S
        parts = torch.split(adv_T, lengths_S.tolist())
        constant = all(map(_is_constant, parts))
        advantage = _column(parts, adv_T.dtype, lengths_S, True) if constant else Column(adv_T, False)
        return replace(self, labels=replace(self.labels, advantage=advantage))


# A micro-batch as planned: its units, each the responses that share one copy of a prompt.
Planned = Sequence[Sequence[Member]]


def make_share(minis: Sequence[Sequence[Planned]], row_multiple: int, routing: Routing | None = None) -> Share:
    """Pack the micro-batches of one rank, mini-batch by mini-batch; with `routing`, experts of these sizes too."""
    micros = list(chain.from_iterable(minis))
    units = list(chain.from_iterable(micros))
    members = list(chain.from_iterable(units))
    sequences = [member.sequence for member in members]
    lengths_S = torch.tensor([s.response_length for s in sequences], dtype=torch.int64)
    table = [[member.group for member in members], [member.flat for member in members]]
    packed = Packed(
        ids=_ids(units),
        sampler=_logp([s.sampler_logp_T for s in sequences], lengths_S),
        policy=_logp([s.policy_logp_T for s in sequences], lengths_S),
        units=torch.tensor(
            [[unit[0].sequence.prompt_length for unit in units], [len(unit) for unit in units]], dtype=torch.int64
        ),
        sequences=torch.stack(
            [lengths_S, *torch.tensor(table, dtype=torch.int64), seeds_to_int64([s.seed for s in sequences])]
        ),
        micros=torch.tensor([len(micro) for micro in micros], dtype=torch.int64),
        minis=tuple(len(mini) for mini in minis),
        row_multiple=row_multiple,
        experts=None if routing is None else _experts(units, routing),
        routing=routing,
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
    advantages = [s.advantage_T for s in sequences]
    constant = all(map(_is_constant, advantages))
    return Labels(
        scores=torch.tensor(scores, dtype=torch.float32),
        mask=_mask([s.mask_T for s in sequences], lengths_S),
        advantage=_column(advantages, torch.float64, lengths_S, constant),
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


def _experts(units: Sequence[Sequence[Member]], routing: Routing) -> Tensor:
    """Join them to [ids, layers, per_token]: a prompt's are those of the first response that has any.

    The last tokens, which no engine has read, go where the token before them went; those of a response without any go
    anywhere.
    """
    parts = []
    for unit in units:
        prompt_length = unit[0].sequence.prompt_length
        known = next((member.sequence.experts for member in unit if member.sequence.experts is not None), None)
        parts.append(routing.anywhere(prompt_length) if known is None else known[:prompt_length])
        for sequence in (member.sequence for member in unit):
            own = sequence.experts
            if own is None:
                parts.append(routing.anywhere(sequence.response_length))
            else:
                unread = int(sequence.tokens.numel()) - own.shape[0]
                parts += [own[prompt_length:], own[-1:].expand(unread, -1, -1)]
    count = sum(part.shape[0] for part in parts)
    experts = torch.empty(count, routing.layers, routing.per_token, dtype=routing.dtype)
    return torch.cat(parts, out=experts) if parts else experts


def _column(parts: Sequence[Tensor], dtype: torch.dtype, lengths_S: Tensor, constant: bool) -> Column:
    """Join sequences' values; `constant` says that each has one value, which is then kept once."""
    if not constant:
        values_T = torch.empty(sum(part.numel() for part in parts), dtype=dtype)
        return Column(torch.cat(list(parts), out=values_T), False)
    values_S = torch.zeros(len(parts), dtype=dtype)
    if parts:
        values_S[lengths_S > 0] = torch.cat([part[:1] for part in parts]).to(dtype)
    return Column(values_S, True)


def _logp(parts: Sequence[Tensor], lengths_S: Tensor) -> Column:
    # They are hardly ever constant by chance, so that reading them all would be in vain.
    return _column(parts, torch.float32, lengths_S, all(map(_is_expanded, parts)))


def _mask(parts: Sequence[Tensor], lengths_S: Tensor) -> Column:
    distinct = [part[:1] if _is_expanded(part) else part for part in parts]
    if any(bool(((part != 0.0) & (part != 1.0)).any()) for part in distinct):
        raise ValueError("a mask is 0 or 1")
    if all(map(_is_constant, parts)):
        return _column(parts, torch.float32, lengths_S, True)
    return Column(torch.cat([part == 1.0 for part in parts]), False)


def _is_expanded(part: Tensor) -> bool:
    """Return True where one value is known to be all tokens', without reading it."""
    return part.numel() <= 1 or part.stride(0) == 0


def _is_constant(part: Tensor) -> bool:
    """Return True where all tokens have the same value, bit for bit."""
    if _is_expanded(part):
        return True
    bits = part.view(_BITS[part.element_size()])
    return bool((bits == bits[0]).all())


# Compared as integers, a NaN equals itself and -0.0 is not 0.0.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
