"""tools/bench_batching.py counts padding as pack() pads, and its least number of micro-batches is a bound."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from cases import each_case

from megasharp.batching.packing import PackLayout, pack, packing_metrics
from megasharp.batching.planning import Flops, plan

FLOPS = Flops(100.0, ((None, 0.01),))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    return importlib.import_module("bench_batching")


@each_case("shared", [True, False])
@each_case("name", ["uniform", "lognormal", "bimodal", "equal"])
def test_padding_is_what_pack_adds(bench: ModuleType, name: str, shared: bool) -> None:
    lengths = bench.draw(name, 64, seed=1)
    sizes = lengths.sizes(FLOPS, shared)
    layout = PackLayout(2, 8192, 1, 128, 1.0, share_prompts=shared, flops=FLOPS)
    batch = pack(bench.sequences(lengths), layout, seed=0)
    ranks = plan(sizes, 2, 8192, 1)
    metrics = packing_metrics(batch, FLOPS)
    assert bench.padding(ranks, sizes, 128) == pytest.approx(metrics["batch/padding"].value)
    assert metrics["batch/padding"].value > 0
    assert len(ranks[0]) == metrics["batch/micro_batches"].value
    assert bench.fewest(sizes, 2, 8192) <= len(ranks[0]) <= bench.fewest(sizes, 2, 8192) + 1
