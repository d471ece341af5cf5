"""Attention of packed runs written out over all rows at once, for tests to compare with, and inputs for it."""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.common.records import Segments

HEADS, GROUPS, DIM = 6, 2, 8


def segments_of(runs: list[tuple[int, int]]) -> Segments:
    lengths = torch.tensor([length for length, _ in runs])
    return Segments(lengths.cumsum(0) - lengths, lengths, torch.tensor([prefix for _, prefix in runs]))


def inputs(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, HEADS, DIM), (rows, GROUPS, DIM), (rows, GROUPS, DIM), (rows, HEADS * DIM))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def visible(segments: Segments, window: int | None, response_window: int | None = None) -> Tensor:
    """bool [P, P]: which rows each row sees; a response window hides only rows of runs that have a prefix."""
    run = torch.repeat_interleave(segments.length)
    before = torch.where(segments.prefix >= 0, segments.length[segments.prefix], 0)
    position = torch.arange(len(run)) - segments.start[run] + before[run]
    distance = position[:, None] - position
    same = (run[:, None] == run) | (segments.prefix[run][:, None] == run)
    recent = (distance < (response_window or len(run))) | (segments.prefix[run] < 0)
    return same & (distance >= 0) & (distance < (window or len(run))) & recent


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("phd,qhd->hpq", query, key) / DIM**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hpq,qhd->phd", weights, value).flatten(1)
