"""Micro-batches as views of a share: each field is computed from the packed tensors where it is read.

Driver and ranks use the same views, so neither sends nor holds what can be computed: numbers that are constant in a
sequence, masks, draws. Rows, which passes read several times, are kept once they are computed. `dataclasses.replace`
makes a plain record of a view, with all of its fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from megasharp.batching.share import Column, Packed, Share
from megasharp.common.records import MicroBatch, Segments, TokenInputs
from megasharp.ops.segment import segment_broadcast
from megasharp.ops.uniform import CHOICE_POSITIONS, uniforms


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """Results of the passes before the update, float32 [T] each; None where nothing asked for it."""

    old_logp_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    ref_logp_T: Tensor | None = None


ANNOTATION_FIELDS = tuple(field.name for field in dataclasses.fields(Annotation))


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of an annotated share that ranks keep: the annotation's number, and the fields that it filled."""

    ticket: int
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of a share's tensors that belongs to one micro-batch."""

    units: slice
    sequences: slice
    tokens: slice
    ids: slice

    @property
    def count(self) -> int:
        """Number of response tokens."""
        return int(self.tokens.stop - self.tokens.start)


def extents(packed: Packed) -> list[Extent]:
    """Return every micro-batch's part, in the order of packing."""
    unit_end = _sums(packed.micros)
    sequence_end = _sums(packed.units[1])[unit_end]
    token_end = _sums(packed.lengths_S)[sequence_end]
    id_end = _sums(packed.units[0])[unit_end] + token_end
    ends = torch.stack([unit_end, sequence_end, token_end, id_end], dim=1).tolist()
    return [
        Extent(*(slice(first, last) for first, last in zip(before, after, strict=True)))
        for before, after in pairwise(ends)
    ]


def _sums(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Rows:
    """The packed rows of one micro-batch: their runs, tokens and places, from a share's tables.

    Its pieces are in the order of packing: of each unit the prompt, then each response.
    """

    def __init__(self, packed: Packed, extent: Extent) -> None:
        self._ids = packed.ids[extent.ids]
        self._experts = None if packed.experts is None else packed.experts[extent.ids]
        self._routing = packed.routing
        prompts_U, members_U = packed.units[:, extent.units]
        self.lengths_S = packed.lengths_S[extent.sequences]
        units, sequences = prompts_U.numel(), self.lengths_S.numel()
        self._unit_S = torch.repeat_interleave(torch.arange(units), members_U)
        # Units and sequences as places among the pieces.
        self._prompt_U = torch.arange(units) + members_U.cumsum(0) - members_U
        self._response_S = torch.arange(sequences) + self._unit_S + 1
        own_K = torch.empty(units + sequences, dtype=torch.int64)
        own_K[self._prompt_U], own_K[self._response_S] = prompts_U, self.lengths_S
        rows_K = own_K.clone()
        # The last response token predicts nothing, so its row is left out.
        rows_K[self._response_S] = (self.lengths_S - 1).clamp(min=0)
        self._ids_K, self._rows_K = own_K, rows_K
        self._start_K = rows_K.cumsum(0) - rows_K
        self._position_K = torch.zeros_like(rows_K)
        self._position_K[self._response_S] = prompts_U[self._unit_S]
        filled = int(rows_K.sum())
        multiple = packed.row_multiple
        self.count = max(multiple, -(-filled // multiple) * multiple)
        self.padding = self.count - filled

    def segments(self) -> Segments:
        """Return the segment table: a run for each prompt, each response of more than a token, and padding."""
        kept_K = self._rows_K > 0
        kept_K[self._prompt_U] = True
        number_K = kept_K.cumsum(0) - 1
        prefix_K = torch.full_like(number_K, -1)
        prefix_K[self._response_S] = number_K[self._prompt_U][self._unit_S]
        last = [self.count - self.padding], [self.padding], [-1]
        pads = [torch.tensor(value if self.padding else [], dtype=torch.int64) for value in last]
        table = (self._start_K, self._rows_K, prefix_K)
        return Segments(*(torch.cat([value_K[kept_K], pad]) for value_K, pad in zip(table, pads, strict=True)))

    def positions(self) -> Tensor:
        """Return every row's position, int64 [P]: they count up within a run."""
        skipped_P = torch.repeat_interleave(self._position_K - self._start_K, self._rows_K)
        return torch.cat([torch.arange(skipped_P.numel()) + skipped_P, torch.arange(self.padding)])

    def tokens(self) -> Tensor:
        """Return every row's token, int64 [P]."""
        tokens_P = torch.zeros(self.count, dtype=torch.int64)
        tokens_P[: self.count - self.padding] = self._ids[self._has_row()]
        return tokens_P

    def experts(self) -> Tensor | None:
        """Return every row's experts, [P, layers, per_token], those of padding anywhere; None without replay."""
        if self._experts is None or self._routing is None:
            return None
        return torch.cat([self._experts[self._has_row()], self._routing.anywhere(self.padding)])

    def _has_row(self) -> Tensor:
        """Return True for the ids that have a row: all but the last of each response."""
        has_row = torch.ones(self._ids.numel(), dtype=torch.bool)
        ends_S = self._ids_K.cumsum(0)[self._response_S]
        has_row[ends_S[self.lengths_S > 0] - 1] = False
        return has_row

    def targets(self) -> Tensor:
        """Return the response tokens, int64 [T]."""
        first_S = (self._ids_K.cumsum(0) - self._ids_K)[self._response_S]
        return self._ids[_counted_from(first_S, self.lengths_S)].long()

    def predicting(self) -> Tensor:
        """Return each response token's row, int64 [T]: its prompt's last one, or that of the token before."""
        last_row_S = (self._start_K + self._rows_K)[self._prompt_U][self._unit_S] - 1
        rows_T = _counted_from(self._start_K[self._response_S] - 1, self.lengths_S)
        present_S = self.lengths_S > 0
        rows_T[(self.lengths_S.cumsum(0) - self.lengths_S)[present_S]] = last_row_S[present_S]
        return rows_T


def _counted_from(first_S: Tensor, lengths_S: Tensor) -> Tensor:
    """Return numbers that count up from each sequence's first one, int64 [T]."""
    skipped_T = torch.repeat_interleave(first_S - (lengths_S.cumsum(0) - lengths_S), lengths_S)
    return skipped_T.add_(torch.arange(skipped_T.numel()))


_View = TypeVar("_View", bound=MicroBatch | TokenInputs)


def _made(kind: type[_View], **held: object) -> _View:
    """Return a view without its record's own constructor, which wants all fields."""
    view = object.__new__(kind)
    view.__dict__.update(held)
    return view


class MicroView(MicroBatch):
    """A micro-batch of a share.

    `annotation` holds what passes before the update found, as far as it is in this process; `kept` says what the ranks
    have of it. `advantages` are in place of the share's where they are not None. Without `draws` there is no draw.
    """

    share: Share
    extent: Extent
    draws: bool
    annotation: Annotation
    kept: Kept | None
    advantages: Tensor | None

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        """Make the plain record: with other fields it is no view any more."""
        return MicroBatch(*fields, **named)  # type: ignore[return-value]

    @classmethod
    def of(cls, share: Share, extent: Extent, draws: bool = True) -> MicroView:
        """Return the view of one micro-batch."""
        return _made(
            MicroView, share=share, extent=extent, draws=draws, annotation=Annotation(), kept=None, advantages=None
        )

    def changed(self, **attributes: object) -> MicroView:
        """Return the view with others of its own attributes."""
        held = {name: value for name, value in self.__dict__.items() if name != "inputs"}
        return _made(MicroView, **{**held, **attributes})

    def with_advantages(self, adv_T: Tensor) -> MicroView:
        """Return the view with other advantages, [T]."""
        return self.changed(advantages=adv_T)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain record."""
        return MicroBatch, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.share.packed, self.extent)

    @property
    def rows(self) -> int:
        """Number of packed rows, padding included."""
        return self._rows.count

    @property
    def response_tokens(self) -> int:
        """Number of response tokens."""
        return self.extent.count

    @cached_property
    def padding(self) -> int:
        return self._rows.padding

    @cached_property
    def segments(self) -> Segments:
        return self._rows.segments()

    @cached_property
    def tokens_P(self) -> Tensor:
        return self._rows.tokens()

    @cached_property
    def positions_P(self) -> Tensor:
        return self._rows.positions()

    @property
    def experts_PLK(self) -> Tensor | None:
        # Not kept: they are many times as large as all else.
        return self._rows.experts()

    @cached_property
    def rows_T(self) -> Tensor:
        return self._rows.predicting()

    @cached_property
    def targets_T(self) -> Tensor:
        return self._rows.targets()

    @cached_property
    def length_S(self) -> Tensor:
        mask, lengths_S = self.share.labels.mask, self.share.packed.lengths_S[self.extent.sequences]
        if mask.constant:
            return mask.values[self.extent.sequences].double() * lengths_S
        # By sequence: the driver reads this of all micro-batches at once, and a number for each token would be kept.
        counts = [part.sum() for part in torch.split(mask.values[self.extent.tokens], lengths_S.tolist())]
        return torch.stack(counts).double() if counts else torch.zeros(0, dtype=torch.float64)

    @property
    def advantage_T(self) -> Tensor:
        if self.advantages is not None:
            return self.advantages
        return self.share.labels.advantage.of(self.extent.sequences, self.extent.tokens, self.inputs.seq_T)

    @cached_property
    def sequence_ids(self) -> tuple[int, ...]:
        return tuple(self.share.packed.sequences[2, self.extent.sequences].tolist())

    @cached_property
    def inputs(self) -> TokenInputs:
        return InputsView.of(self.share, self.extent, self.draws, self.annotation)


class InputsView(TokenInputs):
    """The inputs of a micro-batch of a share.

    It does not refer to the micro-batch, which keeps it: a share in such a cycle would stay until Python looks for
    cycles, and hundreds of MB with it.
    """

    share: Share
    extent: Extent
    draws: bool
    annotation: Annotation

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        """Make the plain record: with other fields it is no view any more."""
        return TokenInputs(*fields, **named)  # type: ignore[return-value]

    @classmethod
    def of(cls, share: Share, extent: Extent, draws: bool, annotation: Annotation) -> InputsView:
        """Return the inputs of one micro-batch."""
        view = _made(InputsView, share=share, extent=extent, draws=draws, annotation=annotation)
        # The learner's own, which it fills in.
        for name in ("logp_T", "entropy_T", "topn_logp_TN", "is_top1_T"):
            object.__setattr__(view, name, None)
        return view

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain record."""
        return TokenInputs, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def _number(self, row: int) -> Tensor:
        """Return a row of the table of sequences, int64 [T]."""
        return segment_broadcast(self.share.packed.sequences[row, self.extent.sequences], self.seq_T)

    def _score(self, row: int) -> Tensor:
        return segment_broadcast(self.share.labels.scores[row, self.extent.sequences], self.seq_T)

    def _column(self, column: Column) -> Tensor:
        return column.of(self.extent.sequences, self.extent.tokens, self.seq_T)

    @property
    def _lengths_S(self) -> Tensor:
        return self.share.packed.lengths_S[self.extent.sequences]

    @property
    def num_sequences(self) -> int:
        return self._lengths_S.numel()

    @cached_property
    def seq_T(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_sequences), self._lengths_S)

    @property
    def mask_T(self) -> Tensor:
        return self._column(self.share.labels.mask).float()

    @property
    def group_T(self) -> Tensor:
        return self._number(1)

    @property
    def reward_T(self) -> Tensor:
        return self._score(0)

    @property
    def correct_T(self) -> Tensor:
        return self._score(1)

    @property
    def group_size_T(self) -> Tensor:
        return self._score(2)

    @property
    def group_correct_T(self) -> Tensor:
        return self._score(3)

    @property
    def sampler_logp_T(self) -> Tensor:
        return self._column(self.share.packed.sampler)

    @property
    def policy_logp_T(self) -> Tensor:
        return self._column(self.share.packed.policy)

    @property
    def draw_T(self) -> Tensor | None:
        if not self.draws:
            return None
        # The same however the step is packed. Sampling draws with positions from 0; these must be other numbers.
        lengths_S = self._lengths_S
        position_T = _counted_from(torch.full_like(lengths_S, CHOICE_POSITIONS), lengths_S)
        return uniforms(self._number(3), position_T)

    @property
    def old_logp_T(self) -> Tensor | None:
        return self.annotation.old_logp_T

    @property
    def old_entropy_T(self) -> Tensor | None:
        return self.annotation.old_entropy_T

    @property
    def ref_logp_T(self) -> Tensor | None:
        return self.annotation.ref_logp_T


def open_share(share: Share, draws: bool = True) -> tuple[tuple[MicroView, ...], ...]:
    """Return the micro-batches of each mini-batch; `draws`: with a uniform number for each token."""
    views = iter([MicroView.of(share, extent, draws) for extent in extents(share.packed)])
    return tuple(tuple(islice(views, count)) for count in share.packed.minis)
