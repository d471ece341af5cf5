"""PKPO's transform against all subsets, its closed form for 0/1 rewards, and published values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import each_case

from megasharp.algos.grpo_best_of import GRPOBestOf
from megasharp.algos.pkpo import PKPO, PKPOParams

# Advantages of correct responses by the number of correct ones of eight, k = 4.
VECTORS = {1: 0.5, 2: 0.2857, 4: 0.0571, 7: 0.0}
REWARDS = [0.3, -1.0, 0.3, 2.0, 0.9, 0.9, 0.0]


def advantages(make_group, rewards: list[float], **params: object) -> list[float]:
    method = PKPO(PKPOParams(**params))
    return method.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()


@each_case("correct", VECTORS)
def test_published_values(make_group, correct: int) -> None:
    got = advantages(make_group, [1.0] * correct + [0.0] * (8 - correct), k=4)
    assert got == pytest.approx([VECTORS[correct]] * correct + [0.0] * (8 - correct), abs=5e-5)


@each_case("k", [2, 3, 5, 7])
def test_leave_one_out_over_all_subsets(make_group, k: int) -> None:
    size = len(REWARDS)
    expected = [0.0] * size
    for subset in itertools.combinations(range(size), k):
        for i in subset:
            without = max(REWARDS[j] for j in subset if j != i)
            expected[i] += (max(REWARDS[j] for j in subset) - without) / math.comb(size, k)
    assert advantages(make_group, REWARDS, k=k) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@each_case("form", ["paper", "fork"])
@each_case("correct", range(1, 9))
def test_closed_form_of_binary_rewards(make_group, correct: int, form: str) -> None:
    k, size = 3, 8
    factor = k / size if form == "paper" else 1.0
    positive = factor * math.comb(size - correct, k - 1) / math.comb(size - 1, k - 1)
    got = advantages(make_group, [0.0] * (size - correct) + [1.0] * correct, k=k, form=form)
    assert got == pytest.approx([0.0] * (size - correct) + [positive] * correct, rel=1e-12)


def test_attempts_of_the_whole_group_are_best_of(make_group) -> None:
    best_of = GRPOBestOf(GRPOBestOf.Params())
    expected = best_of.advantages(torch.tensor(REWARDS, dtype=torch.float64), make_group(REWARDS)).tolist()
    assert advantages(make_group, REWARDS, k=len(REWARDS)) == pytest.approx(expected, rel=1e-12)
    # k above the size of the group means the whole group.
    assert advantages(make_group, REWARDS, k=50) == pytest.approx(expected, rel=1e-12)


@each_case("rewards", [[0.1] * 5, [1.0] * 4, [0.0] * 4, [0.7], []])
def test_nothing_to_compare_is_exactly_zero(make_group, rewards: list[float]) -> None:
    assert advantages(make_group, rewards, k=3) == [0.0] * len(rewards)
