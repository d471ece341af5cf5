"""Stretches of packed runs that attend together: which rows are the queries, and which keys come before them.

A run that continues a shared prompt sees the prompt's rows too (`types.Segments`); in a layer with a window a query
sees only so many positions, its own included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megasharp.types import Segments


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of runs. `start`: the packed row of the first query, `length`: queries, `before`: rows seen before it.

    Of those, the nearest are rows of the span's own run, from row `run_start` on; the further ones end the prefix,
    whose last row is `prefix_end` - 1. All int64, shape [spans].
    """

    start: Tensor
    length: Tensor
    before: Tensor
    run_start: Tensor
    prefix_end: Tensor

    def select(self, chosen: Tensor) -> Spans:
        """Those that an index or a mask picks."""
        return Spans(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def seen(self, span: Tensor, offset: Tensor) -> Tensor:
        """The packed rows that lie `offset` positions from the first query of each `span`; negative is before it."""
        row = self.start[span] + offset
        missing = self.run_start[span] - row
        return torch.where(missing > 0, self.prefix_end[span] - missing, row)

    def within(self, bounds: Iterable[tuple[int, int]], window: int | None) -> Spans:
        """What of the spans lies between rows `first` (included) and `end` of each of the bounds, in their order."""
        return joined([self._between(first, end, window) for first, end in bounds])

    def _between(self, first: int, end: int, window: int | None) -> Spans:
        start = self.start.clamp(min=first)
        before = self.before + (start - self.start)
        cut = Spans(
            start=start,
            length=(self.start + self.length).clamp(max=end) - start,
            before=before if window is None else before.clamp(max=window - 1),
            run_start=self.run_start,
            prefix_end=self.prefix_end,
        )
        return cut.select(cut.length > 0)


def joined(parts: list[Spans]) -> Spans:
    """All of them as one record, in order."""
    return Spans(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Spans)))


def prefix_length(segments: Segments) -> Tensor:
    """Rows of each run's prefix; 0 for a run without."""
    lengths = segments.length[segments.prefix.clamp(min=0)]
    return torch.where(segments.prefix >= 0, lengths, 0)


def longest_context(segments: Segments) -> int:
    """The most positions that any row stands behind, itself included."""
    return int((segments.length + prefix_length(segments)).max())


def spans_of(segments: Segments, window: int | None, step: int | None = None) -> Spans:
    """Every run, whole or cut from its start into spans of `step` rows, the last one shorter."""
    counts = torch.ones_like(segments.length) if step is None else -(-segments.length // step)
    run = torch.repeat_interleave(counts)
    skipped = (torch.arange(run.numel()) - (counts.cumsum(0) - counts)[run]) * (step or 0)
    prefix = segments.prefix[run].clamp(min=0)
    length, before = segments.length[run] - skipped, prefix_length(segments)[run] + skipped
    return Spans(
        start=segments.start[run] + skipped,
        length=length if step is None else length.clamp(max=step),
        before=before if window is None else before.clamp(max=window - 1),
        run_start=segments.start[run],
        prefix_end=segments.start[prefix] + segments.length[prefix],
    )
