"""Variances of pass@k objectives: advantages against the methods, moments against all ordered groups and gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import each_case

from megasharp.algos import grpo
from megasharp.algos.passk_training import PassKTraining
from megasharp.algos.pkpo import PKPO
from megasharp.common import records
from megasharp.studies.smoothing import variance
from megasharp.studies.smoothing.variance import GRPO, RIGHT, RIVALS, Estimator, advantages, moments, zeroed
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Outcome

POLICY_V = np.array([0.25, 0.1, 0.05, 0.3, 0.2, 0.1])
IS_RIGHT_V = np.arange(6) < RIGHT
ALL = (GRPO, *RIVALS)


def by_method(estimator: Estimator, right: int, group_size: int) -> Floats:
    """megasharp's own advantages of a group whose first `right` responses are right."""
    outcomes = [records.Outcome.CORRECT] * right + [records.Outcome.WRONG] * (group_size - right)
    group: Any = SimpleNamespace(responses=[SimpleNamespace(verdict=SimpleNamespace(outcome=o)) for o in outcomes])
    method: Any = {
        "GRPO": lambda: grpo.GRPO(grpo.GRPO.Params()),
        "PKPO": lambda: PKPO(PKPO.Params(k=estimator.k)),
        "GR-PKPO": lambda: PassKTraining(PassKTraining.Params(k=estimator.k)),
    }[estimator.name]()
    rewards_G = torch.tensor([float(i < right) for i in range(group_size)], dtype=torch.float64)
    return np.asarray(method.advantages(rewards_G, group).numpy())


@each_case("estimator", ALL)
@each_case("group_size", variance.GROUP_SIZES)
def test_advantages_are_the_methods(estimator: Estimator, group_size: int) -> None:
    right_C, wrong_C = advantages(estimator, group_size)
    for right in range(group_size + 1):
        expected_G = np.where(np.arange(group_size) < right, right_C[right], wrong_C[right])
        np.testing.assert_allclose(by_method(estimator, right, group_size), expected_G, rtol=1e-12, atol=1e-15)


@each_case("estimator", [GRPO, Estimator("PKPO", 2), Estimator("GR-PKPO", 2)])
def test_moments_over_all_ordered_groups(estimator: Estimator) -> None:
    size = 3
    right_C, wrong_C = advantages(estimator, size)
    gradients, chances = [], []
    for actions in itertools.product(range(6), repeat=size):
        right = int(IS_RIGHT_V[list(actions)].sum())
        own_G = [right_C[right] if IS_RIGHT_V[a] else wrong_C[right] for a in actions]
        gradients.append(sum(own * (np.eye(6)[a] - POLICY_V) for own, a in zip(own_G, actions, strict=True)) / size)
        chances.append(POLICY_V[list(actions)].prod())
    mean_V = np.average(gradients, axis=0, weights=chances)
    spread = np.average(np.square(np.array(gradients) - mean_V).sum(axis=1), weights=chances)
    found = moments(estimator, POLICY_V, size)
    np.testing.assert_allclose(found.mean_V, mean_V, atol=1e-15)
    assert found.variance == pytest.approx(spread, rel=1e-12)
    assert found.relative == pytest.approx(spread / (mean_V @ mean_V), rel=1e-12)


@each_case("group_size", variance.GROUP_SIZES)
@each_case("k", variance.SUBSETS)
def test_pkpo_is_unbiased_for_pass_at_k(group_size: int, k: int) -> None:
    """G times its mean is the gradient of 1 - (1 - accuracy)^k."""
    z = torch.log(torch.tensor(POLICY_V)).requires_grad_()
    passed = 1 - (1 - z.softmax(-1)[:RIGHT].sum()) ** k
    (gradient,) = torch.autograd.grad(passed, z)
    np.testing.assert_allclose(
        group_size * moments(Estimator("PKPO", k), POLICY_V, group_size).mean_V, gradient.numpy(), atol=1e-15
    )


@each_case("estimator", ALL)
def test_all_have_the_direction_of_pass_at_1(estimator: Estimator) -> None:
    accuracy = POLICY_V[:RIGHT].sum()
    direction_V = POLICY_V * (IS_RIGHT_V - accuracy)
    mean_V = moments(estimator, POLICY_V, 5).mean_V
    assert mean_V @ direction_V == pytest.approx(np.linalg.norm(mean_V) * np.linalg.norm(direction_V), rel=1e-12)


def test_zeros_by_hand() -> None:
    """PKPO with k = 4 of five gives zero with fewer than three wrong ones: two or three of the other four right."""
    p, q = 0.3, 0.7
    mixed = 1 - p**4
    assert zeroed(Estimator("PKPO", 4), p, 5) == pytest.approx((6 * p**2 * q**2 + 4 * p**3 * q) / mixed)
    assert zeroed(Estimator("PKPO", 2), p, 5) == 0.0


def test_the_claims_can_hold_and_fail() -> None:
    def verdicts(plain: float, relative: float) -> list[Outcome]:
        made = [
            variance.Ratio(rival, size, accuracy, plain, relative + rise * accuracy, zero)
            for accuracy in variance.ACCURACIES
            for size, rise in zip(variance.GROUP_SIZES, (0.2, 0.1), strict=True)
            for rival in RIVALS
            for zero in (accuracy if rival.k == 4 or rival.name == "GR-PKPO" else 0.0,)
        ]
        return [claim.outcome for claim in variance.judge(made)]

    assert verdicts(1.5, 1.5) == [Outcome.REPRODUCED, Outcome.REPRODUCED, Outcome.PARTLY, Outcome.REPRODUCED]
    assert verdicts(0.5, 0.5) == [Outcome.DIFFERS, Outcome.DIFFERS, Outcome.REPRODUCED, Outcome.REPRODUCED]
