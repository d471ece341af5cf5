"""Closed forms against autograd and enumeration, Theorem B.10's search against brute force, and a counter-example."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megasharp.studies.smoothing import policies as p
from megasharp.studies.smoothing import theorem
from megasharp.studies.smoothing.policies import DIVERGENCES
from megasharp.studies.softmax import Bools, Floats
from megasharp.studies.study import Findings, Outcome

BASE = np.array([0.3, 0.1, 0.4, 0.2])
CORRECT = np.array([True, True, False, False])
BETA, GAMMA, NEGATIVE = np.asarray(0.8), np.asarray(0.3), np.asarray(0.2)


def logit_gradient(policy: Floats, own: float, positive: float, negative: float, bonus: float) -> float:
    """Largest entry of the gradient, by autograd over softmax logits, of E[r] - beta KL with the paper's log terms.

    `own` is 1 where the log terms use the policy itself, 0 where they use the base.
    """
    logits, base, right = torch.tensor(np.log(policy), requires_grad=True), torch.tensor(BASE), torch.tensor(CORRECT)
    q = logits.softmax(-1)
    log = own * q.log() + (1 - own) * base.log()
    reward = torch.where(right, 1 - positive * log, negative * log) - bonus * log
    value = (q * reward).sum() - float(BETA) * (q * (q / base).log()).sum()
    return float(torch.autograd.grad(value, logits)[0].abs().max())


def test_optima_are_stationary() -> None:
    gamma, negative = float(GAMMA), float(NEGATIVE)
    none = np.asarray(0.0)
    reward = CORRECT.astype(float)
    assert logit_gradient(p.vanilla_policy(BASE, reward, BETA), 0, 0, 0, 0) < 1e-15
    assert logit_gradient(p.entropy_policy(BASE, reward, BETA, GAMMA), 0, 0, 0, gamma) < 1e-15
    assert logit_gradient(p.smoothed_policy(BASE, CORRECT, BETA, GAMMA, none), 0, gamma, 0, 0) < 1e-15
    assert logit_gradient(p.smoothed_policy(BASE, CORRECT, BETA, GAMMA, NEGATIVE), 0, gamma, negative, 0) < 1e-15
    assert logit_gradient(p.on_policy_optimum(BASE, CORRECT, BETA, GAMMA, NEGATIVE), 1, gamma, negative, 0) < 1e-12


def test_equation_19_for_a_bonus_on_all() -> None:
    """The optimum for log policy is the one for log base with beta' = beta + gamma."""
    policy = p.entropy_policy(BASE, CORRECT.astype(float), BETA + GAMMA, GAMMA)
    assert logit_gradient(policy, 1, 0, 0, float(GAMMA)) < 1e-15


def test_a_bonus_on_all_responses_is_an_entropy_term() -> None:
    """Appendix B.3: the policy gradient of the reward r - gamma log pi is that of E[r] + gamma H, exactly."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    reward, gamma = torch.arange(7.0, dtype=torch.float64) % 2, 0.3
    logp = logits.log_softmax(-1)
    policy = logp.exp()
    regularised = (policy * reward).sum() - gamma * (policy * logp).sum()
    (expected,) = torch.autograd.grad(regularised, logits, retain_graph=True)
    score = (policy.detach() * (reward - gamma * logp.detach()) * logp).sum()
    (found,) = torch.autograd.grad(score, logits)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-15)


def test_equation_19_two_sided_round_trip() -> None:
    exponent, other = BETA / (BETA + GAMMA), BETA / (BETA - NEGATIVE)
    policy = p.on_policy_optimum(BASE, CORRECT, BETA, GAMMA, NEGATIVE)
    beta = 1 / p.on_policy_rate(policy, BASE, CORRECT, exponent, other)
    again = p.smoothed_policy(BASE, CORRECT, beta, beta * (1 - exponent), beta * (other - 1))
    np.testing.assert_allclose(again, policy, rtol=1e-9)


def test_measures_by_hand() -> None:
    assert p.correctness(BASE, CORRECT) == pytest.approx(0.4)
    # Shares 3/4 and 1/4 of the correct: mean 1/2, variance 1/16, over the squared mean 1/4.
    assert p.normalised_variance(BASE, CORRECT) == pytest.approx(0.25)
    uniform = np.full(4, 0.25)
    assert DIVERGENCES["reverse chi2"](BASE, uniform) == pytest.approx(4 * (0.09 + 0.01 + 0.16 + 0.04) - 1)
    assert DIVERGENCES["forward chi2"](uniform, BASE) == pytest.approx(DIVERGENCES["reverse chi2"](BASE, uniform))
    assert DIVERGENCES["forward KL"](uniform, BASE) == pytest.approx(float((BASE * np.log(4 * BASE)).sum()))


def test_compose_keeps_proportions() -> None:
    policy = p.compose(BASE, CORRECT, np.asarray(0.7), np.asarray(0.5), np.asarray(1.0))
    assert policy.sum() == pytest.approx(1.0) and policy[:2].sum() == pytest.approx(0.7)
    assert policy[0] / policy[1] == pytest.approx(3**0.5) and policy[2] / policy[3] == pytest.approx(2.0)


def test_proof_choice_matches_the_bonus_policy() -> None:
    bonus = p.entropy_policy(BASE, CORRECT.astype(float), BETA, GAMMA)
    beta = 1 / p.matching_rate(BASE, CORRECT, BETA, GAMMA)
    smooth = p.smoothed_policy(BASE, CORRECT, beta, beta * GAMMA / BETA, np.asarray(0.0))
    np.testing.assert_allclose(smooth[:2], bonus[:2], rtol=1e-12)
    assert smooth[2] / smooth[3] == pytest.approx(2.0)
    assert all(divergence(smooth, BASE) <= divergence(bonus, BASE) for divergence in DIVERGENCES.values())


def test_enumeration_by_hand() -> None:
    found, _ = theorem.enumerate_improvement(np.random.default_rng(3), 3)
    assert all(one.counted == pytest.approx(one.formula) for one in found)
    whole, _ = theorem.enumerate_improvement(np.random.default_rng(3), theorem.ENUMERATED)
    # Five samples of five trajectories: all are sampled in 5! orders, and then none gains.
    missed = 120 * np.prod([one.base for one in whole])
    assert all(one.formula - one.counted == pytest.approx(missed) for one in whole)


def brute_force(base: Floats, correct: Bools, bonus: Floats, own: float) -> dict[str, bool]:
    """Theorem B.10's promise over a plain grid of (beta', gamma') through the policy itself, with 0.1 % of slack."""
    ratios = np.append(np.linspace(0, 2.5, 126), own)
    rate, ratio = (part.ravel() for part in np.meshgrid(np.geomspace(1e-7, 30, 500), ratios))
    base_K, correct_K = np.tile(base, (rate.size, 1)), np.tile(correct, (rate.size, 1))
    policy = p.smoothed_policy(base_K, correct_K, 1 / rate, ratio / rate, np.zeros_like(rate))
    good = p.correctness(policy, correct) >= p.correctness(bonus, correct) * 0.999
    good &= p.normalised_variance(policy, correct_K) <= p.normalised_variance(bonus, correct) * 1.001 + 1e-6
    return {name: bool((good & (d(policy, base) <= d(bonus, base) * 1.001)).any()) for name, d in DIVERGENCES.items()}


def counter_example() -> tuple[Floats, Bools, Floats]:
    """Correct .3 and .1, sixty incorrect of .01; gamma / beta = 1/2, and beta so that correctness stays at .4.

    The bonus policy keeps the incorrect ones in the base's proportions (they are equal) and spends all its divergence
    on evening out the correct two. Smoothing that evens them out as much has odds e^(1 / beta') sum_C base^(1/2) / .6,
    at least .59 of correctness: further from the base.
    """
    base, correct = np.array([0.3, 0.1, *([0.01] * 60)]), np.arange(62) < 2
    root = np.sqrt(base)
    rate = np.log(0.4 / 0.6 * root[2:].sum() / root[:2].sum())
    beta = np.asarray(1 / rate)
    return base, correct, p.entropy_policy(base, correct.astype(float), beta, beta / 2)


def test_counter_example_to_theorem_b10() -> None:
    base, correct, bonus = counter_example()
    assert p.correctness(bonus, correct) == pytest.approx(0.4)
    least = theorem.least_correctness(base[None], correct[None], np.array([0.5]))
    assert least == pytest.approx((0.3**0.5 + 0.1**0.5) / (0.3**0.5 + 0.1**0.5 + 0.6))
    found = theorem.can_dominate(base, correct, bonus, np.asarray(0.5))
    assert not any(found.values())
    assert brute_force(base, correct, bonus, 0.5) == dict.fromkeys(DIVERGENCES, False)


def test_can_dominate_agrees_with_brute_force() -> None:
    """On random cases without the proof's choice; brute force has slack, so it may find what is just out of reach."""
    cases = theorem.random_cases(60, np.random.default_rng(5))
    bonus = p.entropy_policy(cases.base_N, cases.reward_N, cases.beta, cases.gamma)
    rate = p.matching_rate(cases.base_N, cases.correct_N, cases.beta, cases.gamma)
    ratio = cases.gamma / cases.beta
    found = theorem.can_dominate(cases.base_N, cases.correct_N, bonus, ratio)
    assert all(holds[rate > 0].all() for holds in found.values())
    lost, agreed = np.flatnonzero(rate <= 0)[:8], 0
    for index in lost:
        brute = brute_force(cases.base_N[index], cases.correct_N[index], bonus[index], ratio[index])
        assert not any(found[name][index] and not brute[name] for name in DIVERGENCES)
        agreed += sum(found[name][index] == brute[name] for name in DIVERGENCES)
    assert len(lost) == 8 and agreed >= 30


def test_study_runs(small_run: Callable[[str], Findings]) -> None:
    findings = small_run("smoothing")
    outcomes = [claim.outcome for claim in findings.claims if claim.where.startswith(("Lemma", "Prop B.3"))]
    assert outcomes == [Outcome.REPRODUCED] * 5
    proof = next(claim for claim in findings.claims if "proof's parameters" in claim.statement)
    assert proof.outcome is Outcome.PARTLY and "0 violations" in proof.ours
