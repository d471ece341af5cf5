"""The actions study: Theorem 1 by autograd and enumeration, closed forms at G = 2, Algorithm 1, and a small run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import each_case

from megasharp.studies.actions import STUDY, experiments
from megasharp.studies.actions.experiments import (
    BASE,
    EXPLORED,
    OPTIMAL,
    RULES,
    Rule,
    enumerated_update,
    measure,
    probability_change,
    slashed,
    theorem_1,
    theorem_ratio,
)
from megasharp.studies.softmax import Floats, policy_gradient, softmax
from megasharp.studies.study import Findings, Outcome, write_findings

POLICY_V, REWARD_V = np.array([0.6, 0.05, 0.35]), np.array([0.5, 1.0, 0.0])


def advantages(rule: Rule, reward_G: Floats) -> Floats:
    """Straight from the words, for one group."""
    size = len(reward_G)
    match rule:
        case "fixed":
            return reward_G
        case "mean":
            return reward_G - reward_G.mean()
        case "leave one out":
            return np.array([r - np.delete(reward_G, i).mean() for i, r in enumerate(reward_G)])
        case "mean and std":
            return (reward_G - reward_G.mean()) / (
                np.sqrt(((reward_G - reward_G.mean()) ** 2).sum() / (size - 1)) + 1e-6
            )
        case "mean, negative only":
            return np.array([a if a < 0 else 0.0 for a in reward_G - reward_G.mean()])


@each_case("rule", RULES)
@each_case("size", [2, 3])
def test_enumeration_is_the_sum_over_all_ordered_groups(rule: Rule, size: int) -> None:
    total_V = np.zeros(3)
    for actions in itertools.product(range(3), repeat=size):
        group = np.array(actions)
        gradient_V = policy_gradient(POLICY_V[None], group[None], advantages(rule, REWARD_V[group])[None])[0]
        total_V += POLICY_V[group].prod() * gradient_V
    np.testing.assert_allclose(enumerated_update(rule, POLICY_V, REWARD_V, size), total_V, atol=1e-15)


def test_theorem_1_is_the_gradient_of_the_expected_reward() -> None:
    z = torch.log(torch.tensor(POLICY_V)).requires_grad_()
    (torch.softmax(z, -1) @ torch.tensor(REWARD_V)).backward()
    assert z.grad is not None
    np.testing.assert_allclose(theorem_1(POLICY_V, REWARD_V), z.grad.numpy(), atol=1e-15)


@each_case("size", [2, 3, 5, 10])
def test_the_group_mean_brings_a_factor(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(5):
        policy_V, reward_V = rng.dirichlet(np.ones(4)), rng.normal(size=4)
        assert theorem_ratio("mean", policy_V, reward_V, size) == pytest.approx((1.0 - 1.0 / size, 0.0), abs=1e-12)
        assert theorem_ratio("leave one out", policy_V, reward_V, size) == pytest.approx((1.0, 0.0), abs=1e-12)
        assert theorem_ratio("mean and std", policy_V, reward_V, size)[1] > 1e-3


def test_normalised_pairs_forget_how_large_rewards_are() -> None:
    """G = 2: A = +-1/sqrt(2), so that E[dz_v] = pi(v) / sqrt(2) (mass of worse actions - mass of better ones)."""
    better_V, worse_V = np.array([0.05, 0.0, 0.65]), np.array([0.35, 0.95, 0.0])
    expected_V = POLICY_V * (worse_V - better_V) / np.sqrt(2.0)
    np.testing.assert_allclose(enumerated_update("mean and std", POLICY_V, REWARD_V, 2), expected_V, rtol=1e-5)


def negative_only_pairs(policy_V: Floats, reward_V: Floats) -> Floats:
    """G = 2: of a pair with rewards r < r', drawn with probability 2 pi pi', only the worse counts, with (r - r')/2."""
    total_V = np.zeros(len(policy_V))
    for worse, better in itertools.permutations(range(len(policy_V)), 2):
        if reward_V[worse] < reward_V[better]:
            drawn = 2.0 * policy_V[worse] * policy_V[better]
            total_V += drawn * (reward_V[worse] - reward_V[better]) / 4.0 * (np.eye(len(policy_V))[worse] - policy_V)
    return total_V


def test_negative_samples_alone_lock_the_explored_action_in() -> None:
    """With all samples the best action gains on a confident a1; with the negative ones alone it loses."""
    confident_V = np.array([0.95, 0.02, 0.03])
    everything_V = enumerated_update("mean", confident_V, REWARD_V, 2)
    negative_V = enumerated_update("mean, negative only", confident_V, REWARD_V, 2)
    np.testing.assert_allclose(negative_V, negative_only_pairs(confident_V, REWARD_V), atol=1e-16)
    assert everything_V[OPTIMAL] > everything_V[EXPLORED]
    assert negative_V[OPTIMAL] < negative_V[EXPLORED]


def test_probability_changes_by_finite_differences() -> None:
    for sampled in range(3):
        moved_V = np.log(POLICY_V) + 1e-6 * (np.eye(3)[sampled] - POLICY_V)
        numeric_V = (softmax(moved_V) - POLICY_V) / 1e-6
        np.testing.assert_allclose(probability_change(POLICY_V, sampled), numeric_V, atol=1e-6)


def test_a_rare_action_rises_with_another_rare_one() -> None:
    """Against remark 2: A > 0 for the second action also raises the third, at the cost of the first."""
    change_V = probability_change(np.array([0.9, 0.05, 0.05]), 1)
    assert change_V[0] < 0 < change_V[2] < change_V[1]


def test_one_step_of_algorithm_1_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experiments.STEPS, "plain", 1)
    policy_RTV = experiments.simulate(replace(BASE, optimizer="plain", lr=1.0), range(20_000))
    change_RV = np.log(policy_RTV[:, 1]) - np.log(policy_RTV[:, 0])
    # Logit updates add up to zero, which the softmax's constant does not.
    change_RV = change_RV - change_RV.mean(axis=-1, keepdims=True)
    error_V = change_RV.std(axis=0) / np.sqrt(len(change_RV))
    assert (np.abs(change_RV.mean(axis=0) - 0.5 * theorem_1(POLICY_V, REWARD_V)) < 4.5 * error_V).all()


def test_sampling_from_its_start_a_temperature_is_a_smaller_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experiments.STEPS, "plain", 50)
    start_V = softmax(4.0 * np.log(POLICY_V))
    hot = replace(BASE, optimizer="plain", temperature=4.0, start=tuple(start_V))
    cold = replace(BASE, optimizer="plain", lr=BASE.lr / 4.0)
    np.testing.assert_allclose(experiments.simulate(hot, range(4)), experiments.simulate(cold, range(4)), rtol=1e-10)


def test_untempered_gives_the_logits_policy_back() -> None:
    logit_V = np.array([1.0, -3.0, 0.5])
    np.testing.assert_allclose(experiments.untempered(softmax(logit_V / 5.0), 5.0), softmax(logit_V))


def test_expected_dynamics_follow_many_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experiments.STEPS, "plain", 100)
    plain = replace(BASE, optimizer="plain")
    mean_TV = experiments.simulate(plain, range(1000)).mean(axis=0)
    np.testing.assert_allclose(mean_TV, experiments.expected_dynamics(plain), atol=0.004)


def test_stages_by_hand() -> None:
    policy_TV = np.array([[0.6, 0.1, 0.3], [0.8, 0.05, 0.15], [0.4, 0.55, 0.05], [0.1, 0.9, 0.0]])
    result = measure(BASE, policy_TV[None])
    assert (result.peak, result.peak_step, result.lowest_optimal) == pytest.approx((0.8, 1, 0.05))
    assert result.at_peak(OPTIMAL) == pytest.approx(0.05)
    assert (result.takeover_step, result.optimal_wins, result.explored_turns_negative_R.tolist()) == (2.0, 1.0, [True])


def test_deviations_by_hand() -> None:
    """Three seeds, a1 at .2, .4 and .9 throughout: .3, .1 and .4 from their mean."""
    policy_RTV = np.tile(np.array([[0.2, 0.8, 0.0], [0.4, 0.6, 0.0], [0.9, 0.1, 0.0]])[:, None], (1, 5, 1))
    result = measure(BASE, policy_RTV)
    np.testing.assert_allclose(np.exp(result.log_deviation_R), [0.3, 0.1, 0.4])
    np.testing.assert_allclose(result.mean_optimal_R, [0.8, 0.6, 0.1])


def test_slashes() -> None:
    assert slashed((0.5, 1.0, 0.0)) == ".5/1/0"


def test_the_study_at_small_size(tmp_path: Path, small_run: Callable[[str], Findings]) -> None:
    findings = small_run("actions")
    names = {path.name for path in write_findings(STUDY, findings, tmp_path)}
    assert names >= {"actions.png", "claims.csv", "theorem.csv", "stages.csv", "temperatures.csv"}
    # The exact ones do not depend on the run: Theorem 1 holds, Algorithm 1 brings its factor.
    assert [claim.outcome for claim in findings.claims[1:3]] == [Outcome.REPRODUCED, Outcome.PARTLY]
    # 30 plain steps of lr .1 do not bring the second stage.
    assert findings.claims[4].outcome is not Outcome.REPRODUCED
