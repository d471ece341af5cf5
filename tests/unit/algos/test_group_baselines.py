"""Dr. GRPO, RLOO and REINFORCE++ with baseline: rewards against their group's, each by its closed form."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from cases import each_case

from megasharp.algos.base import Needs, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.dr_grpo import DrGRPO
from megasharp.algos.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineParams
from megasharp.algos.rloo import RLOO
from megasharp.common.records import Denominators, MiniBatch, StepBatch

REWARDS = [0.0, 0.25, 1.0, -2.0, 0.5]
# RLOO's advantages of correct and wrong responses by the number of correct ones of eight.
RLOO_VECTORS = {1: (1.0, -0.1429), 2: (0.8571, -0.2857), 4: (0.5714, -0.5714), 7: (0.1429, -1.0)}


def advantages(method, make_group, rewards: list[float]) -> list[float]:
    return method.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()


def test_dr_grpo_only_subtracts_the_mean(make_group) -> None:
    mean = statistics.fmean(REWARDS)
    expected = [reward - mean for reward in REWARDS]
    assert advantages(DrGRPO(DrGRPO.Params()), make_group, REWARDS) == pytest.approx(expected, rel=1e-12)


def test_dr_grpo_prescribes_the_sum_over_the_horizon() -> None:
    recipe = build_recipe(["dr_grpo"], {}, reduction=None, constant=16.0, mini_batches=1)
    assert recipe.reduction is Reduction.TOKEN_SUM_OVER_CONSTANT


def test_rloo_compares_with_the_others(make_group) -> None:
    expected = [r - statistics.fmean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    assert advantages(RLOO(RLOO.Params()), make_group, REWARDS) == pytest.approx(expected, rel=1e-12)


@each_case("correct", RLOO_VECTORS)
def test_rloo_published_values(make_group, correct: int) -> None:
    got = advantages(RLOO(RLOO.Params()), make_group, [1.0] * correct + [0.0] * (8 - correct))
    positive, negative = RLOO_VECTORS[correct]
    assert got == pytest.approx([positive] * correct + [negative] * (8 - correct), abs=5e-5)


@each_case("method", [DrGRPO, RLOO, ReinforcePPBaseline])
@each_case("rewards", [[1.0] * 8, [0.0] * 8, [0.1] * 3, [0.7], []])
def test_nothing_to_compare_is_exactly_zero(make_group, method, rewards: list[float]) -> None:
    assert advantages(method(method.Params()), make_group, rewards) == [0.0] * len(rewards)


@each_case(("std", "deviation"), [("unbiased", statistics.stdev), ("population", statistics.pstdev)])
def test_whitening_counts_every_unmasked_token_of_the_step(make_micro, std: str, deviation) -> None:
    micros = [make_micro(Needs(), seed=seed) for seed in (1, 2)]
    scored = [micro.advantage_T[micro.inputs.mask_T > 0].tolist() for micro in micros]
    flat = scored[0] + scored[1]
    mean, spread = statistics.fmean(flat), deviation(flat)
    params = {"reinforce_pp_baseline": ReinforcePPBaselineParams(std=std, epsilon=0.01)}
    recipe = build_recipe(["reinforce_pp_baseline"], params, reduction=None, constant=16.0, mini_batches=1)
    # One micro-batch per optimizer step: the statistics are the training step's all the same.
    minis = tuple(MiniBatch(((micro,),), Denominators(1.0, 1.0, 1.0)) for micro in micros)
    batch, metrics = recipe.calibrate(StepBatch(minis, ("g0", "g1"), 0))
    for mini, micro, before in zip(batch.mini_batches, micros, scored, strict=True):
        got_T = mini.per_rank[0][0].advantage_T
        expected = [(value - mean) / math.sqrt(spread**2 + 0.01) for value in before]
        assert got_T[micro.inputs.mask_T > 0].tolist() == pytest.approx(expected, rel=1e-12)
        assert (got_T[micro.inputs.mask_T == 0] == 0).all()
    assert metrics["method/reinforce_pp_baseline/mean"].value == pytest.approx(mean, rel=1e-12)
    assert metrics["method/reinforce_pp_baseline/deviation"].value == pytest.approx(spread, rel=1e-12)


def test_whitening_of_a_step_without_differences_is_zero(make_micro) -> None:
    micro = make_micro(Needs())
    method = ReinforcePPBaseline(ReinforcePPBaselineParams())
    got_T, _ = method.calibrate(torch.zeros_like(micro.advantage_T), micro.inputs)
    assert (got_T == 0).all()
