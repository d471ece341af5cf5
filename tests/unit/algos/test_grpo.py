"""The estimator against its closed form and published values for groups of eight."""

from __future__ import annotations

import statistics

import pytest
import torch
from cases import each_case

from megasharp.algos.grpo import GRPO, GRPOParams

# Advantages of correct and wrong responses by the number of correct ones of eight, unbiased deviation.
VECTORS = {
    1: (2.4749, -0.3536),
    2: (1.6202, -0.5401),
    4: (0.9354, -0.9354),
    7: (0.3536, -2.4749),
}


def advantages(make_group, rewards: list[float], **params: object) -> list[float]:
    method = GRPO(GRPOParams(**params))
    return method.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()


@each_case("correct", VECTORS)
def test_published_values(make_group, correct: int) -> None:
    got = advantages(make_group, [1.0] * correct + [0.0] * (8 - correct))
    positive, negative = VECTORS[correct]
    assert got[:correct] == pytest.approx([positive] * correct, abs=5e-5)
    assert got[correct:] == pytest.approx([negative] * (8 - correct), abs=5e-5)


@each_case(("std", "deviation"), [("unbiased", statistics.stdev), ("population", statistics.pstdev)])
def test_closed_form(make_group, std: str, deviation) -> None:
    rewards = [0.0, 0.25, 1.0, -2.0, 0.5]
    mean, spread = statistics.fmean(rewards), deviation(rewards)
    expected = [(reward - mean) / (spread + 0.01) for reward in rewards]
    assert advantages(make_group, rewards, std=std, epsilon=0.01) == pytest.approx(expected, rel=1e-12)


@each_case("rewards", [[1.0] * 8, [0.0] * 8, [0.1] * 3, [0.7], []])
def test_nothing_to_compare_is_exactly_zero(make_group, rewards: list[float]) -> None:
    assert advantages(make_group, rewards, epsilon=0.0) == [0.0] * len(rewards)
