"""The analytical advantage against all subsets, against published values, and against GRPO at k = 1."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from cases import each_case

from megasharp.algos import METHODS
from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.algos.passk_training import PassKTraining, PassKTrainingParams

# Advantages of correct and wrong responses by the number of correct ones of eight, k = 4.
VECTORS = {1: (1.0, -0.1429), 2: (0.5222, -0.1741), 4: (0.1204, -0.1204), 7: (0.0, 0.0)}


def advantages(make_group, rewards: list[float], name: str = "passk_training", **params: float) -> list[float]:
    method = METHODS[name](METHODS[name].Params(**params))
    return method.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()


def group_of(correct: int, size: int = 8) -> list[float]:
    return [1.0] * correct + [0.0] * (size - correct)


@each_case("correct", VECTORS)
def test_published_values(make_group, correct: int) -> None:
    positive, negative = VECTORS[correct]
    expected = [positive] * correct + [negative] * (8 - correct)
    assert advantages(make_group, group_of(correct), k=4) == pytest.approx(expected, abs=5e-5)


@each_case(("size", "k"), [(5, 2), (6, 3), (6, 6), (7, 4)])
@each_case("correct", [1, 2, 4])
def test_mean_over_all_subsets(make_group, size: int, k: int, correct: int) -> None:
    """Each subset is one attempt, normalised among all subsets; a response has the mean over those it is in."""
    rewards = group_of(correct, size)
    subsets = list(itertools.combinations(range(size), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean, deviation = statistics.fmean(best), statistics.pstdev(best) + 1e-6
    expected = [
        statistics.fmean((b - mean) / deviation for subset, b in zip(subsets, best, strict=True) if i in subset)
        for i in range(size)
    ]
    got = advantages(make_group, rewards, k=k)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert sum(got) == pytest.approx(0.0, abs=1e-9)


@each_case("correct", [1, 3, 7])
def test_one_response_per_attempt_is_grpo(make_group, correct: int) -> None:
    rewards = group_of(correct)
    grpo = GRPO(GRPOParams(std="population"))
    expected = grpo.advantages(torch.tensor(rewards, dtype=torch.float64), make_group(rewards)).tolist()
    assert advantages(make_group, rewards, k=1) == pytest.approx(expected, rel=1e-12)


@each_case("rewards", [[1.0] * 8, [0.0] * 8, [1.0], [0.0], [], [1.0, 1.0, 0.0]])
def test_nothing_to_learn_is_exactly_zero(make_group, rewards: list[float]) -> None:
    assert advantages(make_group, rewards, k=2) == [0.0] * len(rewards)


def test_k_is_at_most_the_number_of_responses(make_group) -> None:
    assert advantages(make_group, group_of(1, 3), k=8) == advantages(make_group, group_of(1, 3), k=3)


def test_alias_is_the_same_method(make_group) -> None:
    assert METHODS["gr_pkpo"] is METHODS["passk_training"] is PassKTraining
    for correct in range(9):
        rewards = group_of(correct)
        assert advantages(make_group, rewards, "gr_pkpo", k=3) == advantages(make_group, rewards, k=3)
    assert PassKTrainingParams().k == 4
