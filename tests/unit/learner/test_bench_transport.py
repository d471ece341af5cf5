"""tools/bench_transport.py sends what ranks read, and the bytes that it counts are those of the planner's formula."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from cases import each_case

from megasharp.common.layout import ParallelLayout
from megasharp.planner.transport import ADVANTAGE, share_bytes


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    return importlib.import_module("bench_transport")


@each_case("by_token", [True, False])
def test_a_share_has_the_planned_bytes(bench: ModuleType, by_token: bool) -> None:
    """The planner takes it that advantage and mask differ within responses; where they do not, a share has fewer."""
    case = bench.Case(4, 8, 50, 200, 300, ParallelLayout(dp=2, tp=2), budget=4000, by_token=by_token)
    figures = {figure.name: figure.value for figure in bench.measure("case", case)}
    tokens = sum(sequence.response_length for sequence in bench.sequences(case))
    # Each group's prompt is in one micro-batch or two.
    planned = share_bytes(tokens, 6 * 50, 32) - (0 if by_token else ADVANTAGE * tokens)
    assert figures["case: bytes a response token"] == pytest.approx(planned / tokens, rel=0.03)
    # To the one node that both shares have ranks on: advantages and masks are sent twice, with tables and pickles.
    again = (ADVANTAGE if by_token else 0) * tokens
    assert planned + again < figures["case: to a node"] * 1e6 < 1.25 * (planned + again)
    assert figures["case, before shares: to a node"] * 1e6 > 2 * 92 * tokens
