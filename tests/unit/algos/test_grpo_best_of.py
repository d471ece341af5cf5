"""Only a best response that stands alone has an advantage."""

from __future__ import annotations

import pytest
import torch
from cases import each_case

from megasharp.algos.grpo_best_of import GRPOBestOf

REWARDS = [0.3, -1.0, 2.0, 0.9, 0.9]


def advantages(make_group, rewards: list[float]) -> list[float]:
    method = GRPOBestOf(GRPOBestOf.Params())
    return method.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()


@each_case("shift", range(5))
def test_leave_one_out_of_the_maximum(make_group, shift: int) -> None:
    rewards = REWARDS[shift:] + REWARDS[:shift]
    expected = [max(rewards) - max(rewards[:i] + rewards[i + 1 :]) for i in range(5)]
    assert advantages(make_group, rewards) == pytest.approx(expected, rel=1e-12)
    assert sorted(expected)[-2:] == [0.0, pytest.approx(1.1)]


@each_case("rewards", [[1.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4, [0.7], []])
def test_a_shared_best_trains_nothing(make_group, rewards: list[float]) -> None:
    assert advantages(make_group, rewards) == [0.0] * len(rewards)
