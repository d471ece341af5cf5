"""The plan of attention: packed runs as blocks of similar ones, padded inside a block only.

A run that continues a shared prompt sees the prompt's rows too (`records.Segments`). In a layer with a window a query
sees only so many positions, its own included; there runs are cut into spans of at most a window, so that cost and
memory grow with length x window. `Spans` also serve the plans of flash attention (`flash_varlen`).

A response window is another mask, that of DLC's memory network: a query sees all of the prompt and, of its own run, the
last rows. A run without a prefix is a prompt, and sees all of itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner.context_parallel import ContextCut


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of runs. `start`: the packed row of the first query. `length`: queries. `before`: rows seen before it.

    Of those, the nearest are rows of the span's own run, from row `run_start` on; the further ones end the prefix,
    whose last row is `prefix_end` - 1. All int64, shape [spans].
    """

    start: Tensor
    length: Tensor
    before: Tensor
    run_start: Tensor
    prefix_end: Tensor

    def select(self, chosen: Tensor) -> Spans:
        """Return those that an index or a mask picks."""
        return Spans(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def seen(self, span: Tensor, offset: Tensor) -> Tensor:
        """Return the packed rows `offset` positions from the first query of each `span`; negative is before it."""
        row = self.start[span] + offset
        missing = self.run_start[span] - row
        return torch.where(missing > 0, self.prefix_end[span] - missing, row)

    def recent(self, window: int) -> Spans:
        """Leave, of the rows before each span, all of its prefix and the last `window` - 1 of its own run.

        A run without a prefix is its own prefix. `self` must see all rows before it.
        """
        own_end = self.start + self.length
        prompt = self.run_start == self.start - self.before
        run_start = torch.where(prompt, own_end, torch.maximum(self.run_start, self.start - (window - 1)))
        hidden = torch.where(prompt, 0, run_start - self.run_start)
        return replace(
            self,
            before=self.before - hidden,
            run_start=run_start,
            prefix_end=torch.where(prompt, own_end, self.prefix_end),
        )

    def within(self, bounds: Iterable[tuple[int, int]], window: int | None) -> Spans:
        """Cut the spans to the queries from row `first` to before row `end` of each of the bounds, in their order."""
        parts = []
        for first, end in bounds:
            start = self.start.clamp(min=first)
            # A span that began earlier has rows of its own before the cut's first query; keys are those of all ranks.
            before = self.before + (start - self.start)
            cut = Spans(
                start=start,
                length=(self.start + self.length).clamp(max=end) - start,
                before=before if window is None else before.clamp(max=window - 1),
                run_start=self.run_start,
                prefix_end=self.prefix_end,
            )
            parts.append(cut.select(cut.length > 0))
        return Spans(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Spans)))


def prefix_length(segments: Segments) -> Tensor:
    """Return the rows of each run's prefix, int64; 0 for a run without."""
    lengths = segments.length[segments.prefix.clamp(min=0)]
    return torch.where(segments.prefix >= 0, lengths, 0)


def longest_response(segments: Segments) -> int:
    """Return the most rows of a run with a prefix; 0 without one."""
    return int(torch.where(segments.prefix >= 0, segments.length, 0).max())


def longest_context(segments: Segments) -> int:
    """Return the most positions that any row can see, its own included."""
    return int((segments.length + prefix_length(segments)).max())


def spans_of(segments: Segments, window: int | None, step: Tensor | None = None) -> Spans:
    """Return every run, whole or cut from its start into spans of its `step` rows ([runs]), the last one shorter.

    `window`: positions that a query of the layer sees, its own included; None sees all.
    """
    step = segments.length.clamp(min=1) if step is None else step
    counts = (-(-segments.length // step)).clamp(min=1)
    run = torch.repeat_interleave(counts)
    # Rows of the run before each of its spans.
    skipped = (torch.arange(run.numel()) - (counts.cumsum(0) - counts)[run]) * step[run]
    prefix = segments.prefix[run].clamp(min=0)
    length, before = segments.length[run] - skipped, prefix_length(segments)[run] + skipped
    return Spans(
        start=segments.start[run] + skipped,
        length=torch.minimum(length, step[run]),
        before=before if window is None else before.clamp(max=window - 1),
        run_start=segments.start[run],
        prefix_end=segments.start[prefix] + segments.length[prefix],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Runs attended together. B runs, Q and K the longest run's queries and keys.

    `query_BQ`, `key_BK`: packed rows (int64; padding repeats row 0). `mask_BQK`: True where a query sees a key, or
    None where plain causal attention over equal queries and keys says the same.
    """

    query_BQ: Tensor
    key_BK: Tensor
    mask_BQK: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Blocks that hold every packed row as a query once.

    `restore_P`: int64, the place of each packed row's output in the blocks' concatenated padded outputs.
    """

    blocks: list[Block]
    restore_P: Tensor


def full_plan(segments: Segments, num_rows: int) -> AttentionPlan:
    """Plan causal attention where every query sees all positions before it."""
    kind = _octave(segments.length) * 2 + (segments.prefix >= 0)
    return _plan((_run_block(segments, runs) for runs in _alike(kind)), num_rows)


def windowed_plan(segments: Segments, num_rows: int, window: int) -> AttentionPlan:
    """Plan attention where a query sees `window` positions, its own included (arXiv 2310.06825, section 2)."""
    spans = spans_of(segments, window, torch.full_like(segments.length, window))
    return _plan((_windowed_block(spans.select(similar), window) for similar in _similar_spans(spans)), num_rows)


def response_plan(segments: Segments, num_rows: int, window: int) -> AttentionPlan:
    """Plan attention where a query sees its prefix and the last `window` rows of its own run; see the module's text."""
    spans = spans_of(segments, None, _response_step(segments, window)).recent(window)
    blocks = (_windowed_block(spans.select(similar), window, of_response=True) for similar in _similar_spans(spans))
    return _plan(blocks, num_rows)


def _response_step(segments: Segments, window: int) -> Tensor:
    """Return the rows of each run's spans: of a prompt all, else so many that few gather the prefix again."""
    before = prefix_length(segments)
    return torch.where(segments.prefix < 0, segments.length, before.clamp(min=window))


def cut_plan(
    segments: Segments, window: int | None, cut: ContextCut, response_window: int | None = None
) -> AttentionPlan:
    """Plan the queries that a context-parallel rank holds, by numbers of its own rows; keys are all ranks' joined."""
    if response_window is None:
        reach = longest_context(segments) if window is None else window
        step = None if window is None else torch.full_like(segments.length, window)
        spans = spans_of(segments, window, step).within(cut.bounds, window)
    else:
        reach = response_window
        whole = spans_of(segments, None, _response_step(segments, reach))
        spans = whole.within(cut.bounds, None).recent(reach)
    # A held row's number among the rank's own rows, and every row's among the keys, which are joined in ranks' order.
    local_P, places_P = cut.own_places(), cut.places()

    def renumbered(block: Block, valid_BQ: Tensor) -> tuple[Block, Tensor]:
        return Block(local_P[block.query_BQ], places_P[block.key_BK], block.mask_BQK), valid_BQ

    blocks = (
        renumbered(*_windowed_block(spans.select(similar), reach, of_response=response_window is not None))
        for similar in _similar_spans(spans)
    )
    return _plan(blocks, cut.rows // cut.size)


def _plan(blocks: Iterable[tuple[Block, Tensor]], num_rows: int) -> AttentionPlan:
    """Join blocks, each with the mask of its real queries, to a plan."""
    kept: list[Block] = []
    restore_P = torch.full((num_rows,), -1, dtype=torch.int64)
    offset = 0
    for block, valid_BQ in blocks:
        slots_BQ = torch.arange(offset, offset + valid_BQ.numel()).view_as(valid_BQ)
        restore_P[block.query_BQ[valid_BQ]] = slots_BQ[valid_BQ]
        offset += valid_BQ.numel()
        kept.append(block)
    assert bool((restore_P >= 0).all()), "every packed row belongs to exactly one run"
    return AttentionPlan(kept, restore_P)


def _alike(kind: Tensor) -> list[Tensor]:
    """Group indices by kind."""
    return [torch.nonzero(kind == value)[:, 0] for value in torch.unique(kind)]


def _octave(lengths: Tensor) -> Tensor:
    """Return the exponent of the next power of two: grouped by it, a block is padded to less than twice its rows."""
    return torch.ceil(torch.log2(lengths.clamp(min=1).to(torch.float64))).to(torch.int64)


def _grid(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [B, longest] counted from each start, and a mask of the real ones; padding points at row 0."""
    steps = torch.arange(int(length_B.max()) if length_B.numel() else 0)
    valid = steps[None] < length_B[:, None]
    return torch.where(valid, start_B[:, None] + steps[None], 0), valid


def _run_block(segments: Segments, runs: Tensor) -> tuple[Block, Tensor]:
    """Make a block of whole runs, all with a prefix or all without; their keys are the prefix's, then their own."""
    query_BQ, valid_BQ = _grid(segments.start[runs], segments.length[runs])
    prefix_B = segments.prefix[runs]
    if int(prefix_B[0]) < 0:
        # Padded keys follow every real query of their run, so the causal mask already hides them.
        return Block(query_BQ, query_BQ, None), valid_BQ
    before_BK, seen_BK = _grid(segments.start[prefix_B], segments.length[prefix_B])
    queries = query_BQ.shape[1]
    causal_QQ = torch.ones(queries, queries, dtype=torch.bool).tril()
    mask_BQK = torch.cat([seen_BK[:, None].expand(-1, queries, -1), causal_QQ[None].expand(len(runs), -1, -1)], dim=2)
    return Block(query_BQ, torch.cat([before_BK, query_BQ], dim=1), mask_BQK), valid_BQ


def _similar_spans(spans: Spans) -> list[Tensor]:
    """Group indices of spans by the next powers of two of their queries and of the rows that they see before them."""
    return _alike(_octave(spans.length) * 64 + _octave(spans.before))


def _windowed_block(spans: Spans, window: int, of_response: bool = False) -> tuple[Block, Tensor]:
    """Make a block of spans; keys are the rows before each span, aligned at their end, then the span's own.

    `of_response`: the window hides rows of a span's own run, never of its prefix.
    """
    query_BQ, valid_BQ = _grid(spans.start, spans.length)
    queries, reach = query_BQ.shape[1], int(spans.before.max())
    offset_K = torch.arange(-reach, queries)
    row_BK = spans.seen(torch.arange(len(query_BQ))[:, None], offset_K[:reach])
    seen_BK = -offset_K[:reach] <= spans.before[:, None]
    distance_QK = torch.arange(queries)[:, None] - offset_K
    # A padded query sees padded keys, its own among them: no row of the mask is empty.
    within_BQK = ((distance_QK >= 0) & (distance_QK < window))[None]
    if of_response:
        prefix_BK = offset_K < (spans.run_start - spans.start)[:, None]
        within_BQK = within_BQK | ((distance_QK >= 0) & prefix_BK[:, None])
    real_BK = torch.cat([seen_BK, torch.ones_like(query_BQ, dtype=torch.bool)], dim=1)
    key_BK = torch.cat([torch.where(seen_BK, row_BK, 0), query_BQ], dim=1)
    return Block(query_BQ, key_BK, within_BQK & real_BK[:, None]), valid_BQ
