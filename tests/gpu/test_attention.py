"""Attention by every kernel that is installed, on a GPU: outputs and gradients against masked attention in float64."""

from __future__ import annotations

import pytest
import torch
from packed_inputs import RUNS, in_place, inputs, kernels_here, on_gpu, segments_of, with_gradients
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner import flash_varlen
from megasharp.learner.attention import attend
from megasharp.ops.attention_kernels import KernelName

WINDOWS = [(None, None), (1, None), (100, None), (None, 1), (None, 64), (None, 100)]
SIZES = [(8, 2, 128), (4, 4, 64), (16, 2, 256)]
CASES = [
    (kernels, window, response, heads, groups, size)
    for window, response in WINDOWS
    for heads, groups, size in SIZES
    for kernels in kernels_here(size, window, response)
]
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None,
    response_window: int | None = None,
) -> Tensor:
    run = torch.repeat_interleave(segments.length)
    before = torch.where(segments.prefix >= 0, segments.length[segments.prefix], 0)
    position = torch.arange(len(run)) - segments.start[run] + before[run]
    distance = position[:, None] - position
    same = (run[:, None] == run) | (segments.prefix[run][:, None] == run)
    recent = (distance < (response_window or len(run))) | (segments.prefix[run] < 0)
    mask = (same & (distance >= 0) & (distance < (window or len(run))) & recent).cuda()
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("phd,qhd->hpq", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hpq,qhd->phd", weights, value).flatten(1)


@pytest.mark.parametrize(("kernels", "window", "response_window", "heads", "groups", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients(
    kernels: KernelName,
    window: int | None,
    response_window: int | None,
    heads: int,
    groups: int,
    size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = segments_of(RUNS)
    rows = int(segments.length.sum())
    *given, cotangent = inputs(rows, heads, groups, size, dtype)
    exact = [x.double().requires_grad_() for x in given]
    expected = with_gradients(written_out(*exact, segments, window, response_window), exact, cotangent.double())
    given = [x.requires_grad_() for x in given]
    assert flash_varlen.supports(given[0])
    with in_place(kernels) as engine:
        packed = on_gpu(segments, rows, response_window)
        got = with_gradients(attend(*given, packed, window, None, engine), given, cotangent)
    monkeypatch.setattr(flash_varlen, "supports", lambda query: False)
    blocks = with_gradients(attend(*given, on_gpu(segments, rows, response_window), window, None), given, cotangent)
    for mine, theirs, true in zip(got, blocks, expected, strict=True):
        error, usual = ((x.double() - true).norm() / true.norm() for x in (mine, theirs))
        # At this precision torch's masked attention is not exact either.
        # A gradient of 0, as with a window of 1, has no relative error.
        assert (error < 0.02 and error < 2 * usual + 1e-3) or true.norm() < 1e-9


@pytest.mark.parametrize(
    ("kernels", "response_window"),
    [(kernels, window) for window in (None, 64) for kernels in kernels_here(128, window)],
)
def test_layers_do_not_wait_for_the_gpu(kernels: KernelName, response_window: int | None) -> None:
    """Once a micro-batch's plan is there, attention reads nothing back."""
    segments = segments_of(RUNS)
    rows = int(segments.length.sum())
    *given, cotangent = inputs(rows, 8, 2, 128, torch.bfloat16)
    given = [x.requires_grad_() for x in given]
    packed = on_gpu(segments, rows, response_window)
    with in_place(kernels) as engine:
        with_gradients(attend(*given, packed, None, None, engine), given, cotangent)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_gradients(attend(*given, packed, None, None, engine), given, cotangent)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", kernels_here(64))
def test_memory_does_not_grow_with_the_square_of_the_length(kernels: KernelName) -> None:
    def peak(rows: int) -> int:
        *given, cotangent = inputs(rows, 4, 2, 64, torch.bfloat16)
        given = [x.requires_grad_() for x in given]
        packed = on_gpu(segments_of([(rows // 4, -1), (rows - rows // 4, 0)]), rows)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with in_place(kernels) as engine:
            with_gradients(attend(*given, packed, None, None, engine), given, cotangent)
        return torch.cuda.max_memory_allocated() - start

    peak(4096)
    assert peak(32768) < 10 * peak(4096)
