"""The cats study: advantages against megasharp's methods, closed forms of its updates, and a small run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.common.records import Group, Prompt, TaskAnswer
from megasharp.studies.cats import STUDY, claims, criterion, experiments, negatives
from megasharp.studies.cats.claims import held_out_policy
from megasharp.studies.cats.criterion import largest_ratio, rank_correlation
from megasharp.studies.cats.drift import LEADING, calibrated_sampler, drift
from megasharp.studies.cats.negatives import Effect, negatives_claims
from megasharp.studies.cats.reweighing import Reweighing, reweigh
from megasharp.studies.cats.variance import noise, skewed, variance_claim, variance_table
from megasharp.studies.softmax import policy_gradient, sample, softmax, uniforms
from megasharp.studies.study import Findings, Outcome, write_findings

# Every group of four rewards.
REWARDS = np.array(list(itertools.product((0.0, 1.0), repeat=4)))


def any_group() -> Group:
    return Group("g", Prompt("p", "cats", "", (), TaskAnswer(), "", 0, 0), (), 0)


def test_normalised_advantages_are_grpos() -> None:
    grpo = GRPO(GRPOParams())
    for reward_G, ours_G in zip(REWARDS, experiments.advantages("normalised", REWARDS), strict=True):
        theirs_G = grpo.advantages(torch.tensor(reward_G), any_group())
        np.testing.assert_allclose(ours_G, theirs_G.numpy(), rtol=1e-12)


def test_rloo_leaves_one_out() -> None:
    for reward_G, ours_G in zip(REWARDS, experiments.advantages("RLOO", REWARDS), strict=True):
        np.testing.assert_allclose(ours_G, [r - np.delete(reward_G, i).mean() for i, r in enumerate(reward_G)])


def test_whitening_one_group_is_normalising_it() -> None:
    normalised, whitened = (experiments.advantages(name, REWARDS) for name in ("normalised", "RF++-baseline"))
    np.testing.assert_allclose(whitened, normalised, rtol=1e-5)


@pytest.mark.parametrize(("form", "factor"), [("normalized", 0.75), ("literal", 6.0)])
def test_iac_by_hand(form: experiments.IACForm, factor: float) -> None:
    """G=8 with two correct: (1 - 2/8) = 0.75 or (8 - 2) = 6, on the correct ones only (methods.md section 7)."""
    reward_RG = np.array([[1.0, 1.0, *[0.0] * 6]])
    advantage_RG = experiments.advantages("normalised", reward_RG)
    np.testing.assert_allclose(advantage_RG[0, [0, 7]], [1.6202, -0.5401], atol=1e-4)
    ratio_RG = experiments.calibrated_advantages(advantage_RG, reward_RG, 1.0, form) / advantage_RG
    np.testing.assert_allclose(ratio_RG[0], [factor] * 2 + [1.0] * 6)


@pytest.mark.parametrize("estimator", ["raw", "mean-shifted", "normalised"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_drift_is_the_mean_over_all_groups(estimator: experiments.Estimator, alpha: float) -> None:
    """Every group of three labels, by its probability under the sampler, through the update that training takes."""
    rng = np.random.default_rng(3)
    groups_NG = np.array(list(itertools.product(range(4), repeat=3)))
    for _ in range(5):
        policy_V, sampler_V = rng.dirichlet(np.ones(4), 2)
        reward_NG = experiments.rewards(groups_NG)
        weight_NG = experiments.advantages(estimator, reward_NG)
        weight_NG = experiments.calibrated_advantages(weight_NG, reward_NG, alpha, "normalized")
        gradient_NV = policy_gradient(np.tile(policy_V, (len(groups_NG), 1)), groups_NG, weight_NG)
        enumerated_V = sampler_V[groups_NG].prod(axis=1) @ gradient_NV
        found = drift(policy_V, sampler_V, estimator, alpha, 3)
        assert found == pytest.approx(enumerated_V[experiments.CAT] - enumerated_V[experiments.PERSIAN], abs=1e-12)


def test_why_iac_and_dlc_get_in_each_others_way() -> None:
    """Normalised: even samples stop the drift, IAC starts it again; a little DLC adds to it. Raw rewards: neither."""

    def at(estimator: experiments.Estimator, mu: float, alpha: float) -> float:
        return drift(LEADING, calibrated_sampler(LEADING, mu), estimator, alpha, 8)

    assert at("normalised", 1.0, 0.0) == pytest.approx(0.0, abs=1e-12)
    assert at("normalised", 1.0, 1.0) > 0.9 * at("normalised", 0.0, 0.0) > 0.0
    assert at("normalised", 0.25, 0.0) > at("normalised", 0.0, 0.0)
    assert at("raw", 1.0, 1.0) < 0.0 < at("raw", 0.0, 1.0)


def test_alpha_zero_and_mu_zero_change_nothing() -> None:
    plain = experiments.train(experiments.Setting(estimator="normalised", steps=40), [0, 1])
    without_effect = experiments.Setting(estimator="normalised", steps=40, alpha=0.0, importance_cap=2.0)
    np.testing.assert_array_equal(experiments.train(without_effect, [0, 1]).policy_RTV, plain.policy_RTV)


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
def test_held_out_policy_in_closed_form(optimizer: experiments.OptimizerName) -> None:
    trained = experiments.train(experiments.Setting(optimizer=optimizer, steps=60, mu=0.3), range(3))
    for shift in experiments.SHIFTS.values():
        np.testing.assert_allclose(
            held_out_policy(trained.policy_RTV, shift)[:, -1], trained.held_out(shift), rtol=1e-9, atol=1e-15
        )


def test_one_step_of_sgd_by_autograd() -> None:
    trained = experiments.train(experiments.Setting(estimator="RLOO", group_size=6, steps=1), [5])
    label_RG = sample(np.full((1, 4), 0.25), uniforms([5], 1, 6)[:, 0])
    advantage_G = torch.tensor(experiments.advantages("RLOO", experiments.rewards(label_RG))[0])
    weight_DV = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    logp_V = torch.log_softmax(torch.tensor(experiments.PERSIAN_INPUT) @ weight_DV, -1)
    (advantage_G * logp_V[torch.tensor(label_RG[0])]).mean().backward()
    assert weight_DV.grad is not None
    np.testing.assert_allclose(trained.weight_RDV[0], 0.5 * weight_DV.grad.numpy(), atol=1e-15)


def test_importance_weights_undo_dlc_in_expectation() -> None:
    """E_sampler[(pi / sampler) A score] = E_pi[A score]: why DLC with a correction is no DLC."""
    policy_V, sampler_V = softmax(np.array([2.0, 0.0, 1.0, -1.0])), softmax(np.array([0.5, 0.2, 1.5, 0.0]))
    reward_V = experiments.rewards(np.arange(4))

    def expected(probability_V: np.ndarray, weight_V: np.ndarray) -> np.ndarray:
        scores = [
            policy_gradient(policy_V[None], np.array([[label]]), weight_V[None, [label]])[0] for label in range(4)
        ]
        return probability_V @ np.array(scores)

    corrected = expected(sampler_V, reward_V * policy_V / sampler_V)
    np.testing.assert_allclose(corrected, expected(policy_V, reward_V), atol=1e-15)
    assert np.abs(expected(sampler_V, reward_V) - corrected).max() > 0.01


def test_uncorrected_dlc_favours_the_rarer_correct_label() -> None:
    settings = [experiments.Setting(steps=150), experiments.Setting(steps=150, mu=0.5)]
    plain, dlc = (experiments.measure(experiments.train(setting, range(16))) for setting in settings)
    assert claims.less_dominant(dlc, plain) and not claims.less_dominant(plain, dlc)


def test_measures_by_hand() -> None:
    cat_T, persian_T = np.array([0.25, 0.6, 0.96, 0.5]), np.array([0.25, 0.3, 0.03, 0.25])
    policy_RTV = np.stack([cat_T, 1 - cat_T - persian_T, persian_T, np.zeros(4)], axis=-1)[None]
    result = experiments.measure(experiments.Trajectory(policy_RTV, np.zeros((1, 4, 4))))
    assert result.median_step == 2 and result.collapsed == 1.0 and result.cat_wins_R.tolist() == [1.0]
    assert result.dominance == pytest.approx(0.5 / 0.75) and result.siamese["Mid"] == 0.25
    assert result.late_rise_R == pytest.approx(0.5 / 0.75 - 0.96 / 0.99)
    assert result.mean_dominance_R == pytest.approx((0.5 + 0.6 / 0.9 + 0.96 / 0.99 + 0.5 / 0.75) / 4)


def test_the_study_at_small_size(tmp_path: Path, small_run: Callable[[str], Findings]) -> None:
    findings = small_run("cats")
    names = {path.name for path in write_findings(STUDY, findings, tmp_path)}
    assert names >= {"cats.png", "claims.csv", "calibration.csv", "collapse_steps.csv"}
    # 20 steps are far from any collapse under SGD.
    assert findings.claims[0].outcome is Outcome.DIFFERS


def test_reweighing_by_hand() -> None:
    """Two of eight correct: IAC's factor 6/8 on wrong samples too, or (2/8)^-1 on them; 1 / pi of the sampled label."""
    reward_RG = np.array([[1.0, 1.0, *[0.0] * 6]])
    probability_RG = np.array([[0.5, 0.25, *[0.125] * 6]])
    expected: dict[Reweighing, list[float]] = {
        "none": [1.0] * 8,
        "wrong too": [1.0] * 2 + [0.75] * 6,
        "wrong up": [1.0] * 2 + [4.0] * 6,
        "correct / pi": [2.0, 4.0, *[1.0] * 6],
        "all / pi": [2.0, 4.0, *[8.0] * 6],
    }
    for kind, factors in expected.items():
        np.testing.assert_allclose(reweigh(kind, reward_RG, probability_RG, 1.0)[0], factors)


def test_calibrating_wrong_samples_too_is_a_smaller_step() -> None:
    """IAC's factor on all samples of a group scales its step: one step equals that of a learning rate times it."""
    seeds, base = range(20), experiments.Setting(estimator="normalised", steps=1)
    both, plain = (
        experiments.train(setting, seeds).weight_RDV
        for setting in (replace(base, alpha=1.0, reweighing="wrong too"), base)
    )
    label_RG = sample(np.full((20, 4), 0.25), uniforms(seeds, 1, 8)[:, 0])
    wrong_R = 1.0 - experiments.rewards(label_RG).mean(axis=1)
    np.testing.assert_allclose(both, wrong_R[:, None, None] * plain, atol=1e-15)


@pytest.mark.parametrize(("estimator", "group_size"), [("raw", 1), ("raw", 5), ("RLOO", 2)])
def test_noise_in_closed_form(estimator: experiments.Estimator, group_size: int) -> None:
    """Raw: G independent terms r (e_y - p), so the variance of one over G. RLOO at G=2: both orders of each pair."""
    policy_V, scores_VV = skewed(0.05), np.eye(4) - skewed(0.05)
    reward_V = experiments.rewards(np.arange(4))
    if estimator == "raw":
        term_NV, chance_N, terms = reward_V[:, None] * scores_VV, policy_V, group_size
    else:
        gap_VV = reward_V[:, None] - reward_V
        term_NV = (0.5 * gap_VV[..., None] * (scores_VV[:, None] - scores_VV)).reshape(16, 4)
        chance_N, terms = np.outer(policy_V, policy_V).ravel(), 1
    mean_V = chance_N @ term_NV
    spread = (chance_N @ (term_NV**2).sum(axis=-1) - mean_V @ mean_V) / terms
    expected = np.sqrt(spread) / np.linalg.norm(mean_V)
    assert noise(policy_V, estimator, 0.0, "none", group_size) == pytest.approx(expected, rel=1e-10)


def test_the_noise_of_inverse_probabilities_grows_as_the_root_of_rarity() -> None:
    """E[(r / pi)^2] has the term 1 / pi of the rarest correct label, and the mean does not depend on it."""
    rarer, rare = (noise(skewed(p), "raw", 0.0, "all / pi", 4) for p in (1e-6, 1e-4))
    assert rarer / rare == pytest.approx(10.0, rel=0.01)
    table = variance_table()
    assert variance_claim(table).outcome is Outcome.REPRODUCED
    swapped = replace(table, rows=tuple((*row[:2], row[5], *row[3:5], row[2]) for row in table.rows))
    assert variance_claim(swapped).outcome is Outcome.DIFFERS


def test_ratio_of_a_step_by_hand() -> None:
    """Normalised, three Cat, one Persian, four wrong: |A| is the same for all, shares 3/8 and 1/8."""
    label_RTG = np.array([[[0, 0, 0, 2, 1, 1, 1, 1]]])
    shift_RTG = np.abs(experiments.advantages("normalised", experiments.rewards(label_RTG)))
    # By the formula 3/8 of 10 + 7 less 3 for Cat, and 1/8 of it less 1 for Persian.
    assert largest_ratio(label_RTG, shift_RTG, 10.0)[0, 0] == pytest.approx(27 / 8)
    assert largest_ratio(np.ones_like(label_RTG), shift_RTG, 10.0)[0, 0] == -np.inf


def test_rank_correlation_with_ties() -> None:
    """By hand for 1 2 2 3 against 1 3 2 4, ranks 1 2.5 2.5 4: 4.5 / sqrt(4.5 * 5); each value three times."""
    one, other = np.repeat([1.0, 2.0, 2.0, 3.0], 3), np.repeat([1.0, 3.0, 2.0, 4.0], 3)
    assert rank_correlation(one, other) == pytest.approx(4.5 / np.sqrt(4.5 * 5.0))
    assert rank_correlation(one, np.exp(-one)) == pytest.approx(-1.0)
    assert rank_correlation(one[:9], other[:9]) == 0.0 == rank_correlation(np.ones(12), other)


def test_criterion_on_known_steps() -> None:
    """Losses that follow R, and losses everywhere: a measure, and no threshold."""
    ratio_RT = np.tile(np.linspace(0.1, 3.0, 30), (2, 1))
    valid_RT = np.ones_like(ratio_RT, dtype=bool)
    ratios = dict.fromkeys(criterion.ALIGNMENTS, ratio_RT)
    setting = experiments.Setting()
    follows = {setting: criterion.Criterion(valid_RT, ratio_RT - 1.0, ratios)}
    assert [claim.outcome for claim in criterion.criterion_claims(follows)] == [Outcome.REPRODUCED] * 2
    always = {setting: criterion.Criterion(valid_RT, 4.0 - ratio_RT, ratios)}
    assert [claim.outcome for claim in criterion.criterion_claims(always)] == [Outcome.DIFFERS] * 2


def test_negatives_are_judged_by_accuracy_and_by_labels() -> None:
    still = Effect(*(np.full(4, value) for value in (0.7, 0.0, 0.9, 0.1)))
    worse = replace(still, fall_R=np.full(4, 0.2), dominance_R=np.full(4, 0.9))
    effects = {(base, variant): still for base in negatives.BASES for variant in negatives.VARIANTS}
    worst = {(base, variant): worse for base in negatives.BASES for variant in (negatives.ALL, negatives.SAME)}
    assert [c.outcome for c in negatives_claims({**effects, **worst})] == [Outcome.REPRODUCED] * 3
    outcomes = [claim.outcome for claim in negatives_claims(effects)]
    assert outcomes == [Outcome.DIFFERS, Outcome.PARTLY, Outcome.PARTLY]
