"""A step on the shares that ranks kept since `annotate` is bit for bit the one that is sent whole."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from pathlib import Path

import pytest
from launch import run_ranks
from policies import (
    CPU,
    LAYOUTS,
    learner_on,
    micro_batches,
    packed,
    ragged_sequences,
    save_model,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip_cov import ClipCovParams
from megasharp.batching.views import MicroView
from megasharp.common.records import StepBatch, StepStats
from megasharp.learner.learner import POLICY, RankLearner
from megasharp.learner.ranks import messages
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.learner.ranks.processes import ProcessRanks

# `clip_cov` picks by numbers of the driver what ranks must find by theirs; `kl` is read by the loss alone.
RECIPE = build_recipe(
    ("grpo", "clip_cov", "forking_tokens", "kl"),
    {"clip_cov": ClipCovParams(share=0.1, low=0.0, high=9.0)},
    reduction=None,
    constant=40.0,
    mini_batches=2,
)

Run = tuple[list[StepStats], dict[str, Tensor]]


def by_hand(batch: StepBatch) -> StepBatch:
    """The same batch of plain records, which are sent whole."""
    minis = [
        dataclasses.replace(mini, per_rank=tuple(tuple(map(dataclasses.replace, rank)) for rank in mini.per_rank))
        for mini in batch.mini_batches
    ]
    return dataclasses.replace(batch, mini_batches=tuple(minis))


def run(folder: str, layout: str, kept: bool) -> Run:
    values = settings(folder, LAYOUTS[layout], RECIPE.needs)
    with learner_on(values) as (learner, own):
        stats = []
        for seed in range(2):
            batch = packed(ragged_sequences(seed), values.layout, mini_batches=2)
            batch = learner.annotate(batch, RECIPE.annotation, RECIPE.read_before_update if kept else None)
            assert own._held is not None
            assert {micro.inputs.ref_logp_T is None for micro in micro_batches(batch)} == {kept}
            batch, _ = RECIPE.calibrate(batch if kept else by_hand(batch))
            stats.append(learner.step(batch, RECIPE))
            assert own._held is None
        return stats, weights_of(learner)


def on_rank(rank: int, world: int, folder: str, layout: str) -> tuple[Run, Run]:
    return run(folder, layout, kept=True), run(folder, layout, kept=False)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "dp2"),
        *(pytest.param(4, layout, marks=pytest.mark.long("layouts")) for layout in ("tp2dp2", "pp2cp2")),
    ],
)
def test_a_step_on_kept_shares_is_the_same(world: int, layout: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("model"), "qwen3-tied")
    for (stats, weights), (expected, expected_weights) in run_ranks(world, on_rank, folder, layout):
        assert [dataclasses.replace(one, seconds={}) for one in stats] == [
            dataclasses.replace(one, seconds={}) for one in expected
        ]
        assert stats[0].metrics["policy/clip_cov"].total > 0.0
        assert weights.keys() == expected_weights.keys()
        assert all(weights[name].equal(expected_weights[name]) for name in weights)


def without_collections(learner: RankLearner) -> int:
    """Keep this process from looking for cycles; returns its id."""
    gc.disable()
    return os.getpid()


def mapped(process: int) -> int:
    """Return the number of memory files of calls that the process maps."""
    maps = Path(f"/proc/{process}/maps").read_text(encoding="ascii").splitlines()
    return len({line.split()[4] for line in maps if "memfd:megasharp-call" in line})


@pytest.mark.parametrize(("kept", "stepped"), [(True, True), (True, False), (False, True)])
def test_a_share_is_gone_after_its_step(
    kept: bool, stepped: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the driver and on the ranks, which wait for the next call, where nobody looks for cycles.

    So it is where no step comes of it.
    """
    monkeypatch.setattr(messages, "_SMALL", 1)
    monkeypatch.setattr(messages, "INLINE_BYTES", 1)
    folder, layout = save_model(tmp_path_factory.mktemp("model"), "qwen3-tied"), LAYOUTS["dp2"]
    values = settings(folder, layout, RECIPE.needs)
    learner = RanksLearner(ProcessRanks({POLICY: values}, CPU, tmp_path_factory.mktemp("logs")))
    gc.disable()
    try:
        processes = learner.call(without_collections)
        batch = packed(ragged_sequences(), layout, mini_batches=2)
        (view, *_) = micro_batches(batch)
        assert isinstance(view, MicroView)
        ids = weakref.ref(view.share.packed.ids)
        if kept:
            batch = learner.annotate(batch, RECIPE.annotation, RECIPE.read_before_update)
            assert all(mapped(process) == 1 for process in processes)
        method = RECIPE if kept else build_recipe(("grpo",), {}, reduction=None, constant=40.0, mini_batches=2)
        batch, _ = method.calibrate(batch)
        if stepped:
            learner.step(batch, method)
        else:
            learner.forget()
        del batch, view
        assert ids() is None
        assert [mapped(process) for process in processes] == [0, 0]
    finally:
        gc.enable()
        learner.close()
