"""Packed rows for the tests of attention on a GPU: runs, random inputs, gradients, and the kernels to test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner.attention_setup import put_in_place
from megasharp.learner.packed import PackedRows, packed_rows
from megasharp.ops.attention_kernels import KernelName, Site, refusal, software_here

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


def kernels_here(
    size: int, window: int | None = None, response_window: int | None = None, deterministic: bool = False
) -> list[KernelName]:
    """Name those that are installed and serve this card and such a model: FA2 without a card."""
    there = torch.cuda.is_available()
    site = Site(
        gpu=True,
        dtype="bfloat16",
        head_dims=(size,),
        windows=window is not None,
        response_window=response_window is not None,
        deterministic=deterministic,
        capability=torch.cuda.get_device_capability() if there else (8, 0),
    )
    names: tuple[KernelName, ...] = ("fa2", "fa3", "fa4", "te")
    return [name for name in names if name == "fa2" or (there and not refusal(name, site, software_here()))]


@contextmanager
def in_place(kernels: KernelName) -> Iterator[bool]:
    """Attend by these kernels; yields True where Transformer Engine is to be called."""
    put_in_place(kernels)
    try:
        yield kernels == "te"
    finally:
        put_in_place("fa2")


def with_gradients(out: Tensor, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, cotangent)]
