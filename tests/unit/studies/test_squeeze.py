"""The squeeze study: finite differences and closed forms as oracles, and its claims on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megasharp.studies.softmax import entropy, softmax
from megasharp.studies.squeeze import dynamics
from megasharp.studies.squeeze.claims import Measured, claims, draw, measure, tables
from megasharp.studies.squeeze.dynamics import (
    VOCABULARY,
    LemmaTrials,
    distinct,
    drawn_distinct,
    lemma_trials,
    on_policy,
    peak,
    penalty_gradient,
    plateau,
    probability_change,
    repeated_penalty,
    start_logits,
    with_top,
)
from megasharp.studies.squeeze.mixture import DRIFTS, coefficients, logit_gradient, mixture_trials
from megasharp.studies.study import Outcome

LOGIT_V = np.random.default_rng(7).normal(scale=1.5, size=9)


def test_penalty_gradient_is_that_of_finite_differences() -> None:
    token, step = 4, 1e-6
    shifted = [softmax(LOGIT_V + sign * step * np.eye(9)[v])[token] for v in range(9) for sign in (1, -1)]
    expected_V = -(np.array(shifted[::2]) - np.array(shifted[1::2])) / (2 * step)
    got_SV = penalty_gradient(torch.from_numpy(LOGIT_V)[None], torch.tensor([token]))
    np.testing.assert_allclose(got_SV[0].numpy(), expected_V, atol=1e-9)


def test_probability_change_is_that_of_a_small_step() -> None:
    direction_V, step = np.random.default_rng(8).normal(size=9), 1e-6
    expected_V = (softmax(LOGIT_V + step * direction_V) - softmax(LOGIT_V - step * direction_V)) / (2 * step)
    got_SV = probability_change(torch.from_numpy(LOGIT_V)[None], torch.from_numpy(direction_V)[None])
    np.testing.assert_allclose(got_SV[0].numpy(), expected_V, atol=1e-9)


def test_lemma_holds_on_random_distributions() -> None:
    trials = lemma_trials(3, trials=300)
    assert trials.error < 1e-14 and trials.logit_share == 1.0 and trials.probability_share == 1.0


def test_some_alternatives_lose_probability_where_the_algebra_says_so() -> None:
    # For v != y the change is p_y p_v (p_v - t), t = sum_{u != y} p_u^2 - p_y (1 - p_y): those below t lose.
    p_V = np.array([0.6, 0.2, 0.15, 0.05])
    threshold = 0.6**2 + 0.2**2 + 0.05**2 - 0.15 * 0.85
    logit_SV = torch.from_numpy(np.log(p_V))[None]
    change_V = probability_change(logit_SV, penalty_gradient(logit_SV, torch.tensor([2])))[0].numpy()
    np.testing.assert_allclose(change_V[[0, 1, 3]], 0.15 * p_V[[0, 1, 3]] * (p_V[[0, 1, 3]] - threshold), atol=1e-15)
    assert (change_V > 0).tolist() == [True, False, False, False]


def test_a_lemma_that_failed_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamics, "penalty_gradient", lambda logit_SV, token_S: -torch.softmax(logit_SV, dim=-1))
    trials = lemma_trials(3, trials=50)
    assert trials.error > 0.01 and trials.logit_share < 0.1


def test_start_is_zipf_like_and_ranked() -> None:
    p_V = softmax(start_logits())
    np.testing.assert_allclose(p_V / p_V[0], (np.arange(VOCABULARY) + 1.0) ** -1.5, rtol=1e-12)


def test_penalising_rank_1_flattens_and_lower_ranks_squeeze() -> None:
    flattened_TV, squeezed_TV = repeated_penalty(1), repeated_penalty(2)
    assert entropy(flattened_TV[-1]) > entropy(flattened_TV[0]) and entropy(squeezed_TV[-1]) < 0.01
    np.testing.assert_allclose(squeezed_TV.sum(axis=-1), 1.0)


def test_expected_on_policy_update_is_zero_but_sampling_concentrates() -> None:
    p_V = softmax(start_logits())
    np.testing.assert_allclose(p_V @ (np.eye(VOCABULARY) - p_V), 0.0, atol=1e-16)
    top_TR = on_policy(1.0, range(20)).max(axis=-1)
    assert top_TR.shape == (dynamics.SAMPLED_STEPS + 1, 20) and top_TR[-1].mean() > top_TR[0].mean() + 0.2


def test_on_policy_moves_only_by_the_sampled_token() -> None:
    p_TRV = on_policy(-1.0, (0, 1))
    change_RV = np.log(p_TRV[1]) - np.log(p_TRV[0]) - dynamics.SAMPLED_LR * p_TRV[0]
    # What is left of -lr (e_y - p) is -lr at the sampled token, up to each row's normalisation.
    change_RV = change_RV - np.median(change_RV, axis=-1, keepdims=True)
    hit_RV = np.abs(change_RV + dynamics.SAMPLED_LR) < 1e-9
    assert hit_RV.sum(axis=-1).tolist() == [1, 1] and np.abs(change_RV[~hit_RV]).max() < 1e-9


def test_plateau_and_peak_have_one_entropy_and_differ() -> None:
    np.testing.assert_allclose([entropy(plateau()), entropy(peak())], np.log(3), atol=1e-12)
    assert peak().max() > 0.8 and plateau().max() == pytest.approx(1 / 3) and peak().sum() == pytest.approx(1.0)
    np.testing.assert_allclose(entropy(peak(2.0)), 2.0, atol=1e-12)


def test_distinct_of_an_even_tail_has_a_closed_form() -> None:
    top, samples = 0.7, 6
    rest = 0.3 / (VOCABULARY - 1)
    expected = 1 - 0.3**samples + (VOCABULARY - 1) * (1 - (1 - rest) ** samples)
    assert distinct(with_top(top), samples) == pytest.approx(expected, rel=1e-12)
    assert drawn_distinct(with_top(top), samples, 20_000, seed=0) == pytest.approx(expected, abs=0.04)
    assert distinct(plateau(), 2) == pytest.approx(5 / 3)


def test_both_mixtures_by_hand() -> None:
    """Naive: alpha / N gamma^(n) in front of each candidate's e_v - pi; corrected: alpha / N gamma."""
    old_V, new_V = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.4, 0.35, 0.2, 0.05])
    logit_SV, old_logp_SV = (torch.from_numpy(np.log(p_V))[None] for p_V in (new_V, old_V))
    token_S, top_SN, alpha = torch.tensor([3]), torch.tensor([[0, 1, 2]]), 0.3
    ratio_V = new_V / old_V
    for corrected, expected_N in ((False, ratio_V[:3]), (True, np.full(3, ratio_V[3]))):
        got_SN = coefficients(logit_SV, old_logp_SV, token_S, top_SN, corrected)
        np.testing.assert_allclose(got_SN[0].numpy(), expected_N, rtol=1e-12)
        expected_V = (1 - alpha) * ratio_V[3] * (np.eye(4)[3] - new_V)
        expected_V = expected_V + alpha / 3 * (expected_N @ (np.eye(4)[:3] - new_V))
        got_SV = logit_gradient(logit_SV, old_logp_SV, token_S, top_SN, alpha, corrected)
        np.testing.assert_allclose(got_SV[0].numpy(), expected_V, atol=1e-15)


def test_the_mixtures_differ_off_policy_only() -> None:
    on_policy, *drifted = (mixture_trials(drift, 1) for drift in DRIFTS)
    assert (on_policy.unequal, on_policy.spread, on_policy.gap) == (0.0, 1.0, 0.0)
    assert all(trials.unequal == 1.0 and trials.error < 1e-14 for trials in drifted)
    # Three coefficients exp(drift * normal), up to a shared factor: the mean range of three normals is 1.693.
    assert drifted[0].spread == pytest.approx(1 + 0.01 * 1.693, abs=0.001)


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(range(10))


def test_study_reports_every_table_and_claim(measured: Measured) -> None:
    for table in tables(measured):
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    assert [table.name for table in tables(measured)] == ["penalised", "sampled", "distinct", "shapes", "mixtures"]
    assert len(draw(measured).axes) == 6
    assert len(claims(measured)) == 11


def test_claims_follow_the_figures(measured: Measured) -> None:
    broken = replace(
        measured,
        lemma=LemmaTrials(error=0.1, logit_share=0.5, probability_share=0.5, losing=1.0),
        distinct={key: (formula, formula + 1.0) for key, (formula, _) in measured.distinct.items()},
        penalised=dict.fromkeys(measured.penalised, measured.penalised[1]),
        shapes=dict.fromkeys(measured.shapes, plateau()),
        sampled={advantage: p_TRV[::-1] for advantage, p_TRV in measured.sampled.items()},
        mixtures=tuple(replace(trials, unequal=0.5, error=0.1) for trials in measured.mixtures),
    )
    kept = {Outcome.REPRODUCED: 0, Outcome.PARTLY: 0}
    for claim in claims(broken):
        if claim.outcome in kept:
            kept[claim.outcome] += 1
    # Only what the breakage leaves alone: the limit of Proposition 3, and its value at a small budget.
    assert kept == {Outcome.REPRODUCED: 1, Outcome.PARTLY: 1}
    assert sum(claim.outcome is Outcome.REPRODUCED for claim in claims(measured)) == 7
