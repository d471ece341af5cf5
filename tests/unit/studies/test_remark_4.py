"""Remark 4 on three actions: optimizers against torch, the bonus against autograd and its closed form, resets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import each_case

from megasharp.studies.actions import experiments, remark_4
from megasharp.studies.actions.experiments import BASE, OPTIMIZERS, OptimizerName, simulate
from megasharp.studies.actions.remark_4 import Case, Stages, judge, summarise, train
from megasharp.studies.softmax import Adam, Ascent, Counts, Floats, Optimizer, sample, softmax, uniforms
from megasharp.studies.study import Outcome

STEPS = 25


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for optimizer in OPTIMIZERS:
        monkeypatch.setitem(experiments.STEPS, optimizer, STEPS)


@each_case("optimizer", OPTIMIZERS)
@each_case("negative_only", [False, True])
def test_without_remedies_it_is_algorithm_1(optimizer: OptimizerName, negative_only: bool) -> None:
    setting = replace(BASE, optimizer=optimizer, negative_only=negative_only)
    other = Case(replace(setting, rewards=(0.8, 1.0, 0.0)))
    own = Case(setting, remark_4.default_momentum(optimizer))
    np.testing.assert_allclose(train([other, own], range(3))[1], simulate(setting, range(3)), rtol=1e-12)


def by_torch(case: Case, seed: int) -> Floats:
    """One seed of a case with torch's optimizers and autograd of the objective, straight from the words."""
    setting, uniform_TG = case.setting, uniforms([seed], STEPS, 2)[0]
    logit = torch.tensor(np.log(setting.start), requires_grad=True)
    if setting.optimizer == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam([logit], lr=0.1, betas=(case.momentum, 0.999))
    else:
        optimizer = torch.optim.SGD([logit], lr=0.1 * (1 - case.momentum), momentum=case.momentum)
    path = []
    for step in range(STEPS):
        policy = logit.softmax(-1)
        path.append(policy.detach().numpy().copy())
        action_G = torch.tensor(sample(path[-1][None], uniform_TG[None, step])[0])
        reward_G = torch.tensor(setting.rewards, dtype=torch.float64)[action_G]
        gain = ((reward_G - reward_G.mean()) * policy[action_G].log()).mean()
        loss = -gain - case.bonus * -(policy * policy.log()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array([*path, logit.softmax(-1).detach().numpy()])


@each_case("optimizer", OPTIMIZERS)
@each_case(("momentum", "bonus"), [(0.9, 0.0), (0.99, 0.0), (0.9, 0.1)])
def test_momentum_and_bonus_by_torch(optimizer: OptimizerName, momentum: float, bonus: float) -> None:
    case = Case(replace(BASE, optimizer=optimizer), momentum, bonus)
    ours_RTV = train([case], [4, 5])[0]
    for row, seed in enumerate((4, 5)):
        np.testing.assert_allclose(ours_RTV[row], by_torch(case, seed), rtol=1e-7)


@each_case("make", [lambda: Adam(0.1), lambda: Ascent(0.1, 0.9)])
def test_a_reset_starts_anew_in_its_own_rows(make: Callable[[], Optimizer]) -> None:
    gradient_TRV = np.random.default_rng(0).normal(size=(9, 2, 3))
    reset, kept = make(), make()
    for gradient_RV in gradient_TRV[:5]:
        reset.change(gradient_RV, gradient_RV)
        kept.change(gradient_RV, gradient_RV)
    reset.reset(np.array([[True], [False]]))
    fresh = make()
    for gradient_RV in gradient_TRV[5:]:
        after_RV = reset.change(gradient_RV, gradient_RV)
        np.testing.assert_allclose(after_RV[0], fresh.change(gradient_RV, gradient_RV)[0])
        np.testing.assert_allclose(after_RV[1], kept.change(gradient_RV, gradient_RV)[1])


def test_a_reset_comes_before_the_step_that_is_given() -> None:
    """Until then the run is the one without; then it is a fresh one on the rest of the random numbers."""
    case = Case(replace(BASE, optimizer="plain"), 0.9)
    at_R: Counts = np.array([10, STEPS + 1])
    kept_RTV, reset_RTV = train([case], range(2))[0], train([case], range(2), [at_R])[0]
    np.testing.assert_array_equal(kept_RTV[0, :11], reset_RTV[0, :11])
    np.testing.assert_array_equal(kept_RTV[1], reset_RTV[1])
    # The first step without a buffer is lr (1 - m) times the gradient: half the pair's difference of rewards, or none.
    action_G = sample(reset_RTV[:1, 10], uniforms([0], STEPS, 2)[:, 10])[0]
    reward_G = np.array(BASE.rewards)[action_G]
    gradient_V = ((reward_G - reward_G.mean())[:, None] * np.eye(3)[action_G]).mean(axis=0)
    expected_V = softmax(np.log(reset_RTV[0, 10]) + 0.1 * 0.1 * gradient_V)
    np.testing.assert_allclose(reset_RTV[0, 11], expected_V, rtol=1e-12)


def test_the_bonus_rests_at_the_softmax_of_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 - 1/G) r / coefficient = (2.5, 5, 0), where the expected update is zero; the mean of many steps is near."""
    monkeypatch.setitem(experiments.STEPS, "plain", 3000)
    rest_V = softmax(0.5 * np.array(BASE.rewards) / 0.1)
    drift_V = experiments.enumerated_update("mean", rest_V, np.array(BASE.rewards), 2)
    np.testing.assert_allclose(drift_V + 0.1 * remark_4.entropy_gradient(rest_V[None])[0], 0.0, atol=1e-15)
    end_RV = train([Case(replace(BASE, optimizer="plain"), bonus=0.1)], range(8))[0, :, 2000:].mean(axis=1)
    np.testing.assert_allclose(end_RV.mean(axis=0), rest_V, atol=0.02)


def test_figures_by_hand() -> None:
    policy_TV = np.array([[0.6, 0.1, 0.3], [0.8, 0.05, 0.15], [0.4, 0.55, 0.05], [0.1, 0.9, 0.0]])
    found = summarise(np.stack([policy_TV, policy_TV[::-1], policy_TV[[0, 1, 1, 1]]]))
    assert (found.peak_R.tolist(), found.peak_step_R.tolist()) == ([0.8, 0.8, 0.8], [1, 2, 1])
    # The last one never gets there: one more than its last step.
    assert found.takeover_R.tolist() == [2, 0, 4] and found.end_R.tolist() == [0.9, 0.1, 0.05]
    assert found.optimal_R[0] == pytest.approx(0.4)


def test_the_claims_can_hold_and_fail() -> None:
    """Made-up stages: the verdicts follow from whether the second stage comes sooner or later."""

    def stages(sooner: float) -> Stages:
        row_R = np.array([0.5, 0.51]) + 0.1 * sooner
        return Stages(row_R, np.array([5, 5]), np.array([200, 202]) - int(50 * sooner), row_R, row_R)

    def verdicts(momentum: float, reset: float, bonus: float) -> list[Outcome]:
        found: dict[Case, Stages] = {}
        for optimizer in OPTIMIZERS:
            for case in (*remark_4.momentum_cases(optimizer), *remark_4.bonus_cases(optimizer)):
                found[case] = stages(momentum * (case.momentum > 0) + bonus * (case.bonus > 0))
                if case.momentum and not case.bonus:
                    found[replace(case, reset=True)] = stages(momentum + reset)
        return [claim.outcome for claim in judge(found)]

    assert verdicts(-1, 1, 1) == [Outcome.REPRODUCED] * 3
    assert verdicts(1, -1, -1) == [Outcome.DIFFERS] * 3
    assert verdicts(-1, 0, 1) == [Outcome.REPRODUCED, Outcome.PARTLY, Outcome.REPRODUCED]
