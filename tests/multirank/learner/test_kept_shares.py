"""A step on the shares that ranks kept since `annotate` is bit for bit the one that is sent whole."""

from __future__ import annotations

import dataclasses

import pytest
from launch import run_ranks
from policies import LAYOUTS, learner_on, micro_batches, packed, ragged_sequences, save_model, settings, weights_of
from torch import Tensor

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip_cov import ClipCovParams
from megasharp.common.records import StepBatch, StepStats

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
        (4, "tp2dp2"),
        pytest.param(4, "pp2cp2", marks=pytest.mark.long("layouts")),
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
