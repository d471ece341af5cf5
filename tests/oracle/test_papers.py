"""The four papers' own methods: IAC, DS-GRPO, Entropy-Adv and CaSP, alone and combined."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from harness import Answer, Case, Complex, check, clip, each_step, log_softmax, maximum, random_case, run, stop

from megasharp.algos.casp import CaSPParams
from megasharp.algos.clip import ClipParams
from megasharp.algos.ds import DSParams
from megasharp.algos.entropy_adv import EntropyAdvParams
from megasharp.algos.iac import IACParams

LOW, HIGH = 0.1, 0.15
# Tight bounds, so that many tokens are clipped on either side.
TIGHT = ClipParams(low=LOW, high=HIGH)
# Advantages per scored response, one per token.
Advantages = dict[Answer, list[float]]


def normalised(group: list[Answer], rewards: list[float]) -> list[float]:
    """(r - mean) / (std + 1e-6), zero where all rewards are equal."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(group)
    return [(r - float(np.mean(rewards))) / (float(np.std(rewards, ddof=1)) + 1e-6) for r in rewards]


def grpo(case: Case) -> Advantages:
    found: Advantages = {}
    for group in case.groups:
        advantages = normalised(group, [answer.reward for answer in group])
        found |= {answer: [A] * answer.length for answer, A in zip(group, advantages, strict=True)}
    return found


def clipped(case: Case, z: Complex, advantages: Advantages, low: float = LOW, high: float = HIGH):
    """Token mean of max(-A rho, -A clip(rho))."""
    logp, old = case.logp(z), case.logp(case.z_old)
    total = 0.0
    for answer in case.scored:
        for t, A in zip(range(answer.start, answer.stop), advantages[answer], strict=True):
            rho = np.exp(logp[..., t] - old[t])
            total = total + maximum(-A * rho, -A * clip(rho, 1 - low, 1 + high)) / case.tokens
    return total


IAC_FORMS = ("normalized", "literal", "budget", "inverse")


def iac(case: Case, advantages: Advantages, alpha: float, form: str) -> Advantages:
    """w(q) A for the correct responses of positive advantage."""
    weights, positive = {}, []
    for group in case.groups:
        for answer in group:
            wrong = sum(1 for other in group if not other.correct)
            if form == "inverse":
                # Of a group without a correct answer no weight is used.
                weights[answer] = ((len(group) - wrong) / len(group)) ** -alpha if wrong < len(group) else 1.0
            else:
                weights[answer] = float(wrong if form == "literal" else wrong / len(group)) ** alpha
            if answer.correct and answer.length and advantages[answer][0] > 0:
                positive.append(answer)
    if form == "budget":
        mean = float(np.mean([weights[answer] for answer in positive]))
        weights = {answer: weight / mean for answer, weight in weights.items()}
    return {a: [weights[a] * A if a in positive else A for A in values] for a, values in advantages.items()}


@each_step
@each_case("alpha", [0.0, 0.5, 1.0, 2.0])
@each_case("form", IAC_FORMS)
def test_iac(case: Case, form: str, alpha: float) -> None:
    params = {"clip": TIGHT, "iac": IACParams(alpha=alpha, form=form)}
    check(case, lambda c, z: clipped(c, z, iac(c, grpo(c), alpha, form)), ["grpo", "iac"], params)


@each_step
def test_iac_with_alpha_zero_is_grpo(case: Case) -> None:
    plain = run(case, ["grpo"])
    for form in IAC_FORMS:
        other = run(case, ["grpo", "iac"], {"iac": IACParams(alpha=0.0, form=form)})
        assert other.loss == pytest.approx(plain.loss, rel=1e-12)
        assert np.abs(other.gradient - plain.gradient).max() <= 1e-12


def ds(case: Case, advantages: Advantages, gamma_p: float, gamma_n: float, form: str, policy: bool) -> Advantages:
    """A - gamma_p log pi_old for correct responses, A + gamma_n log pi_old for all others."""
    recorded = case.logp(case.z_old) if policy else case.engine_logp
    found: Advantages = {}
    for answer, values in advantages.items():
        logp = recorded[answer.start : answer.stop]
        if form == "seq_mean" and answer.length:
            logp = [float(np.mean(logp))] * answer.length
        if form == "seq_sum":
            logp = [float(np.sum(logp))] * answer.length
        factor = -gamma_p if answer.correct else gamma_n
        found[answer] = [A + factor * value for A, value in zip(values, logp, strict=True)]
    return found


@each_step
@each_case(("gamma_p", "gamma_n"), [(0.3, 0.2), (0.3, 0.0), (0.0, 0.2)])
@each_case("logp", ["engine", "policy"])
@each_case("form", ["token", "seq_mean", "seq_sum"])
def test_ds(case: Case, form: str, logp: str, gamma_p: float, gamma_n: float) -> None:
    def oracle(c: Case, z: Complex):
        return clipped(c, z, ds(c, grpo(c), gamma_p, gamma_n, form, logp == "policy"))

    params = {"clip": TIGHT, "ds": DSParams(gamma_p=gamma_p, gamma_n=gamma_n, form=form, logp=logp)}
    check(case, oracle, ["grpo", "ds"], params)


@each_step
def test_ds_in_the_reward(case: Case) -> None:
    def reshaped(c: Case) -> Advantages:
        found: Advantages = {}
        for group in c.groups:
            rewards = []
            for answer in group:
                mean = float(np.mean(c.engine_logp[answer.start : answer.stop])) if answer.length else 0.0
                rewards.append(answer.reward + (-0.3 if answer.correct else 0.2) * mean)
            advantages = normalised(group, rewards)
            found |= {answer: [A] * answer.length for answer, A in zip(group, advantages, strict=True)}
        return found

    params = {"clip": TIGHT, "ds": DSParams(gamma_p=0.3, gamma_n=0.2, form="reward_seq_mean")}
    check(case, lambda c, z: clipped(c, z, reshaped(c)), ["grpo", "ds"], params)


@each_step
@each_case("form", ["token", "seq_mean", "seq_sum", "reward_seq_mean"])
def test_ds_with_gammas_at_zero_is_grpo(case: Case, form: str) -> None:
    plain = run(case, ["grpo"])
    other = run(case, ["grpo", "ds"], {"ds": DSParams(gamma_p=0.0, gamma_n=0.0, form=form)})
    assert other.loss == pytest.approx(plain.loss, rel=1e-12)
    assert np.abs(other.gradient - plain.gradient).max() <= 1e-12


@each_step
def test_ds_grpo(case: Case) -> None:
    """The bundle, its clip wide above."""
    check(case, lambda c, z: clipped(c, z, ds(c, grpo(c), 0.01, 0.01, "token", False), 0.2, 0.25), ["ds_grpo"])


def entropy_adv(case: Case, advantages: Advantages, a: float, kappa: float) -> Advantages:
    """A + min(a H, |A| / kappa), with the entropy before the update."""
    H = case.entropy(case.z_old)
    return {
        answer: [A + min(a * float(H[answer.start + i]), abs(A) / kappa) for i, A in enumerate(values)]
        for answer, values in advantages.items()
    }


@each_step
@each_case(("a", "kappa"), [(0.4, 2.0), (0.1, 1.5), (0.0, 2.0)])
def test_entropy_adv(case: Case, a: float, kappa: float) -> None:
    params = {"clip": TIGHT, "entropy_adv": EntropyAdvParams(a=a, kappa=kappa)}
    check(case, lambda c, z: clipped(c, z, entropy_adv(c, grpo(c), a, kappa)), ["grpo", "entropy_adv"], params)


def casp(case: Case, z: Complex, advantages: Advantages, p: CaSPParams):
    """The printed ratios, old candidates and all: gamma+ of equation 4, gamma- of equation 5, then the clip."""
    logp_V, old_V = log_softmax(z / case.temperature), log_softmax(case.z_old / case.temperature)
    H = case.entropy(stop(z))
    total = 0.0
    for answer in case.scored:
        for t, A in zip(range(answer.start, answer.stop), advantages[answer], strict=True):
            y = case.target[t]
            # The candidates of the unmoved logits: the complex step does not reorder them.
            top = np.argsort(-case.z[t])[: p.topn]
            gamma = np.exp(logp_V[..., t, y] - old_V[t, y])
            entropies = H.reshape(-1, case.T)[0, answer.start : answer.stop]
            w = float(p.quantile == 0 or entropies[t - answer.start] > np.quantile(entropies, p.quantile))
            pi = np.exp(log_softmax(case.z[t] / case.temperature))[top]
            omega = pi / pi.sum() if p.omega == "softmax" else np.full(p.topn, 1 / p.topn)
            factor = 1.0
            if A > 0:
                gamma_n = np.exp(logp_V[..., t, top] - old_V[t, top])
                others = (omega * stop(gamma[..., None] / gamma_n) * gamma_n).sum(-1)
                gamma = (1 - p.alpha * w) * gamma + p.alpha * w * others
            if A < 0 and w and y == top[0]:
                on_ratio = p.penalty_on == "ratio"
                gamma, factor = (p.lambda_top1 * gamma, 1.0) if on_ratio else (gamma, p.lambda_top1)
            scaled = factor * A
            total = total + maximum(-scaled * gamma, -scaled * clip(gamma, 1 - LOW, 1 + HIGH)) / case.tokens
    return total


@each_step
@each_case("quantile", [0.0, 0.5, 0.8, 1.0])
@each_case("penalty_on", ["ratio", "advantage"])
@each_case("omega", ["uniform", "softmax"])
def test_casp(case: Case, omega: str, penalty_on: str, quantile: float) -> None:
    p = CaSPParams(alpha=0.4, lambda_top1=1.2, quantile=quantile, omega=omega, penalty_on=penalty_on)
    result = check(case, lambda c, z: casp(c, z, grpo(c), p), ["grpo", "casp"], {"clip": TIGHT, "casp": p})
    assert (result.metrics["method/casp/gate_rate"] > 0) == (quantile < 1)


@each_step
@each_case(("alpha", "topn", "lambda_top1"), [(0.01, 3, 1.1), (1.0, 1, 1.0), (0.5, 9, 2.0)])
def test_casp_coefficients(case: Case, alpha: float, topn: int, lambda_top1: float) -> None:
    p = CaSPParams(alpha=alpha, topn=topn, lambda_top1=lambda_top1, quantile=0.3)
    check(case, lambda c, z: casp(c, z, grpo(c), p), ["grpo", "casp"], {"clip": TIGHT, "casp": p})


@each_step
@each_case("penalty_on", ["ratio", "advantage"])
@each_case("values", [(0.0, 1.0, 0.0), (0.7, 1.5, 1.0)])
def test_casp_that_does_nothing_is_grpo(case: Case, penalty_on: str, values: tuple[float, float, float]) -> None:
    alpha, lambda_top1, quantile = values
    p = CaSPParams(alpha=alpha, lambda_top1=lambda_top1, quantile=quantile, penalty_on=penalty_on)
    plain, other = run(case, ["grpo"]), run(case, ["grpo", "casp"], {"casp": p})
    assert other.loss == pytest.approx(plain.loss, rel=1e-12)
    assert np.abs(other.gradient - plain.gradient).max() <= 1e-12


def test_the_two_penalties_differ_on_the_cases() -> None:
    """Else the parametrisation above would test one of them twice."""
    results = [
        run(random_case(0), ["grpo", "casp"], {"clip": TIGHT, "casp": CaSPParams(quantile=0.0, penalty_on=where)})
        for where in ("ratio", "advantage")
    ]
    assert np.abs(results[0].gradient - results[1].gradient).max() > 1e-3


@each_step
def test_all_together_in_the_order_of_the_recipe(case: Case) -> None:
    """DS, then IAC on its result, then CaSP; IAC first gives another gradient."""
    p = CaSPParams(alpha=0.4, lambda_top1=1.2, quantile=0.3)
    params = {
        "clip": TIGHT,
        "casp": p,
        "ds": DSParams(gamma_p=0.3, gamma_n=0.2),
        "iac": IACParams(alpha=2.0, form="budget"),
    }

    def oracle(c: Case, z: Complex):
        return casp(c, z, iac(c, ds(c, grpo(c), 0.3, 0.2, "token", False), 2.0, "budget"), p)

    result = check(case, oracle, ["grpo", "ds", "iac", "casp"], params)
    swapped = run(case, ["grpo", "iac", "ds", "casp"], params)
    assert np.abs(result.gradient - swapped.gradient).max() > 1e-4
