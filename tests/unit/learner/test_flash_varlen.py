"""The path of the variable-length kernels, with a stand-in at its end, against the blocks' and plain attention."""

from __future__ import annotations

import dataclasses

import pytest
import stand_in_flash
import torch
from cases import each_case
from plain_attention import DIM, inputs, segments_of, visible, written_out
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner import flash_varlen
from megasharp.learner.attention import attend
from megasharp.learner.block_plan import response_plan, spans_of
from megasharp.learner.flash_varlen import VarlenPlan, response_plans, varlen_attention, varlen_plan
from megasharp.learner.packed import packed_rows

# Prompts of 5 and 1 rows with two and one responses, and runs that share nothing.
RUNS = [(5, -1), (7, 0), (1, 0), (1, -1), (12, 3), (9, -1), (1, -1), (3, -1)]
WINDOWS = [None, 1, 2, 3, 4, 5, 8, 13, 17, 100]


def results(
    way: str,
    segments: Segments,
    window: int | None,
    dtype: torch.dtype = torch.float64,
    response_window: int | None = None,
) -> list[Tensor]:
    rows = int(segments.length.sum())
    query, key, value, cotangent = inputs(rows, dtype)
    if way == "written out":
        out = written_out(query, key, value, visible(segments, window, response_window))
    else:
        tables = torch.empty(rows, DIM // 2)
        packed = packed_rows(segments, tables, tables, response_window=response_window)
        out = attend(query, key, value, packed, window, DIM**-0.5)
    return [out, *torch.autograd.grad(out, (query, key, value), cotangent.detach())]


@each_case("window", WINDOWS)
def test_the_whole_path_is_plain_attention_and_the_blocks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = segments_of(RUNS)
    blocks = results("attend", segments, window)
    plain = results("written out", segments, window)
    stand_in_flash.use_stand_in(monkeypatch)
    kernels = results("attend", segments, window)
    for got, block, expected in zip(kernels, blocks, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(block, expected, rtol=1e-12, atol=1e-13)


@each_case("window", [1, 2, 5, 11, 12])
def test_a_response_window_hides_rows_of_the_response_alone(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = segments_of(RUNS)
    plain = results("written out", segments, None, response_window=window)
    blocks = results("attend", segments, None, response_window=window)
    stand_in_flash.use_stand_in(monkeypatch)
    kernels = results("attend", segments, None, response_window=window)
    for got, block, expected in zip(kernels, blocks, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(block, expected, rtol=1e-12, atol=1e-13)


def test_a_response_window_costs_prompt_and_window_for_each_token() -> None:
    segments = segments_of([(300, -1), (4000, 0), (4000, 0), (60, 0)])
    queries = 8060
    blocks = response_plan(segments, 8360, 100).blocks
    assert sum(block.query_BQ.numel() * block.key_BK.shape[1] for block in blocks) <= queries * 3 * (300 + 100)
    parts = response_plans(segments, 8360, 100, None)
    assert [(part.most_queries, part.most_keys) for part in parts] == [(300, 360), (4000, 4000), (4000, 300)]


@each_case("window", [None, 3])
@each_case("queries", [1, 4, 9])
def test_the_stand_in_is_masked_attention(window: int | None, queries: int) -> None:
    """Fewer queries than keys: the last query sees the last key, with its gradients by autograd."""
    query, key, value, cotangent = inputs(9)
    query = query.detach()[:queries].requires_grad_()
    distance = torch.arange(queries)[:, None] + 9 - queries - torch.arange(9)
    expected = written_out(query, key, value, (distance >= 0) & (distance < (window or 9)))
    starts = (torch.tensor([0, queries], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32))
    plan = VarlenPlan(*starts, queries, 9, None, 9, window)
    with torch.no_grad():
        out, *statistics = stand_in_flash.forward(query, key, value, plan, None)
        gradient = cotangent[:queries].view_as(out)
        got = stand_in_flash.backward(gradient, query, key, value, out, statistics, plan, None)
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-12, atol=1e-13)
    gradients = torch.autograd.grad(expected, (query, key, value), cotangent[:queries].detach())
    for one, other in zip(got, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_sums_over_responses_do_not_round_in_bfloat16() -> None:
    """A prompt's row that 1,000 responses see: bfloat16 cannot count beyond 256."""
    plan = VarlenPlan(torch.tensor([0, 1]), torch.tensor([0, 1]), 1, 1, torch.zeros(1000, dtype=torch.int64), 2, None)
    summed = flash_varlen._summed([torch.ones(1000, 1, 1, dtype=torch.bfloat16)], [plan], None)
    assert summed.flatten().tolist() == [1000.0, 0.0]


def test_without_shared_prompts_nothing_is_gathered() -> None:
    segments = segments_of([(5, -1), (1, -1), (8, -1)])
    assert varlen_plan(spans_of(segments, None), 14, None).key_rows is None
    assert varlen_plan(spans_of(segments, 3), 14, 3).key_rows is None


def test_of_a_prompt_only_what_the_window_reaches_is_gathered() -> None:
    plan = varlen_plan(spans_of(segments_of([(100, -1), (10, 0)]), 8), 110, 8)
    assert plan.key_starts.tolist() == [0, 100, 117] and plan.most_keys == 100


@each_case(("window", "response_window"), [(None, None), (3, None), (None, 3)])
def test_torchs_operators_take_these_arguments(window: int | None, response_window: int | None) -> None:
    """Their schema and shapes, on torch's meta device: nothing is computed."""
    segments = segments_of(RUNS)
    rows = int(segments.length.sum())
    tables = torch.empty(rows, 1)
    plans = packed_rows(segments, tables, tables, response_window=response_window).varlen_plans(window)
    assert len(plans) == (3 if response_window else 1) and all(plan.key_rows is not None for plan in plans)
    there = [in_meta(plan) for plan in plans]
    tensors = [x.detach().bfloat16().to("meta").requires_grad_() for x in inputs(rows)[:3]]
    out = varlen_attention(*tensors, there, 0.3)
    gradients = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in (out, *gradients)] == [(x.shape, x.dtype) for x in (tensors[0], *tensors)]


def in_meta(plan: VarlenPlan) -> VarlenPlan:
    tensors = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    moved = {name: x.to("meta") for name, x in tensors.items() if isinstance(x, Tensor)}
    return dataclasses.replace(plan, **moved)


def test_the_cpu_takes_blocks() -> None:
    assert not flash_varlen.supports(torch.empty(3, 2, 64, dtype=torch.bfloat16))
