"""Packed rows for the tests of attention on a GPU: runs, random queries, keys and values, gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner.packed import PackedRows, packed_rows

# Prompts with responses, runs that share nothing, and stretches longer than the kernels' tiles.
RUNS = [(150, -1), (300, 0), (1, 0), (129, 0), (1, -1), (400, 4), (257, -1), (3, -1)]


def segments_of(runs: list[tuple[int, int]]) -> Segments:
    lengths = torch.tensor([length for length, _ in runs])
    return Segments(lengths.cumsum(0) - lengths, lengths, torch.tensor([prefix for _, prefix in runs]))


def inputs(rows: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, heads, size), (rows, groups, size), (rows, groups, size), (rows, heads * size))
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def on_gpu(segments: Segments, rows: int, response_window: int | None = None) -> PackedRows:
    tables = torch.empty(rows, 1, device="cuda")
    return packed_rows(segments, tables, tables, response_window=response_window)


def with_gradients(out: Tensor, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, cotangent)]
