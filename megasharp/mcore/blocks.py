"""Which rows attend to which: packed runs as blocks of similar ones, padded inside a block only.

Runs that continue a shared prompt see the prompt's keys too. In a layer with a window a query sees only so many
positions back; there runs are cut into pieces of at most a window, so that cost and memory grow with length x window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.mcore.context import ContextCut
from megasharp.mcore.spans import Spans, longest_context, spans_of
from megasharp.types import Segments


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

    `restore_P`: for each packed row, where its output lies in the blocks' concatenated padded outputs.
    """

    blocks: list[Block]
    restore_P: Tensor


def full_plan(segments: Segments, num_rows: int) -> AttentionPlan:
    """Every query sees all positions before it."""
    return _plan((_block(segments, runs) for runs in _similar_runs(segments)), num_rows)


def windowed_plan(segments: Segments, num_rows: int, window: int) -> AttentionPlan:
    """Every query sees `window` positions, its own included (arXiv 2310.06825, section 2)."""
    spans = spans_of(segments, window, step=window)
    return _plan((_windowed_block(spans.select(similar), window) for similar in _similar_spans(spans)), num_rows)


def cut_plan(segments: Segments, window: int | None, cut: ContextCut) -> AttentionPlan:
    """Of the queries that a context-parallel rank holds: they are its own rows, and keys those of all ranks joined."""
    reach = longest_context(segments) if window is None else window
    spans = spans_of(segments, window, step=window).within(cut.bounds, window)
    local_P, places_P = torch.zeros(cut.rows, dtype=torch.int64), cut.places()
    local_P[cut.held()] = torch.arange(cut.rows // cut.size)

    def renumbered(block: Block, valid_BQ: Tensor) -> tuple[Block, Tensor]:
        return Block(local_P[block.query_BQ], places_P[block.key_BK], block.mask_BQK), valid_BQ

    blocks = (renumbered(*_windowed_block(spans.select(similar), reach)) for similar in _similar_spans(spans))
    return _plan(blocks, cut.rows // cut.size)


def _plan(blocks: Iterable[tuple[Block, Tensor]], num_rows: int) -> AttentionPlan:
    """From blocks and which of their queries are real."""
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


def _similar_runs(segments: Segments) -> list[Tensor]:
    """Indices of runs, grouped by having a prefix and by the next power of two of their length.

    Bounding the spread of lengths inside a block bounds its padding to less than half.
    """
    kind = _octave(segments.length) * 2 + (segments.prefix >= 0)
    return [torch.nonzero(kind == value)[:, 0] for value in torch.unique(kind)]


def _octave(lengths: Tensor) -> Tensor:
    return torch.ceil(torch.log2(lengths.clamp(min=1).to(torch.float64))).to(torch.int64)


def _grid(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, longest] counted from each start, and which of them are real; padding points at row 0."""
    steps = torch.arange(int(length_B.max()) if length_B.numel() else 0)
    valid = steps[None] < length_B[:, None]
    return torch.where(valid, start_B[:, None] + steps[None], 0), valid


def _block(segments: Segments, runs: Tensor) -> tuple[Block, Tensor]:
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
    """Indices of spans, grouped by the next powers of two of their queries and of what they see before them."""
    kind = _octave(spans.length) * 64 + _octave(spans.before)
    return [torch.nonzero(kind == value)[:, 0] for value in torch.unique(kind)]


def _windowed_block(spans: Spans, window: int) -> tuple[Block, Tensor]:
    """Keys are the rows before each span, aligned at their end, then the span's own."""
    query_BQ, valid_BQ = _grid(spans.start, spans.length)
    queries, reach = query_BQ.shape[1], int(spans.before.max())
    offset_K = torch.arange(-reach, 0)
    row_BK = spans.seen(torch.arange(len(query_BQ))[:, None], offset_K)
    seen_BK = -offset_K <= spans.before[:, None]
    distance_QK = torch.arange(queries)[:, None] - torch.arange(-reach, queries)
    # A padded query sees padded keys, its own among them: no row of the mask is empty.
    within_QK = (distance_QK >= 0) & (distance_QK < window)
    real_BK = torch.cat([seen_BK, torch.ones_like(query_BQ, dtype=torch.bool)], dim=1)
    key_BK = torch.cat([torch.where(seen_BK, row_BK, 0), query_BQ], dim=1)
    return Block(query_BQ, key_BK, within_QK & real_BK[:, None]), valid_BQ
