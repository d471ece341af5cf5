"""Ratios, surrogates, weights and corrections, each written token by token from its formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import each_case
from harness import Answer, Case, Complex, absolute, check, clip, each_step, maximum, stop
from test_base import grpo_advantages

from megasharp.algos.base import Reduction
from megasharp.algos.cispo import CISPOParams
from megasharp.algos.clip import ClipParams
from megasharp.algos.clip_cov import ClipCovParams
from megasharp.algos.entropy_bonus import EntropyBonusParams
from megasharp.algos.forking_tokens import ForkingTokensParams
from megasharp.algos.group_statistics import ComparedParams
from megasharp.algos.gspo import GSPOParams
from megasharp.algos.kl_cov import KLCovParams
from megasharp.algos.off_policy_mask import OffPolicyMaskParams
from megasharp.algos.ratio_mask import RatioMaskParams
from megasharp.algos.truncated_is import TruncatedISParams

# Where the hash of the choice among tokens starts counting positions.
CHOICE = 1 << 32
WORD = (1 << 64) - 1

Term = Callable[[Answer, int], Any]


def token_mean(case: Case, term: Term) -> Any:
    return sum(term(a, t) for a in case.scored for t in range(a.start, a.stop)) / case.tokens


def sequence_mean(case: Case, term: Term) -> Any:
    spoken = [a for a in case.scored if a.length]
    return sum(sum(term(a, t) for t in range(a.start, a.stop)) / a.length for a in spoken) / len(spoken)


def ppo(A: float, rho: Any, low: float, high: float) -> Any:
    return maximum(-A * rho, -A * clip(rho, 1 - low, 1 + high))


def scored_tokens(case: Case) -> list[int]:
    return [t for a in case.scored for t in range(a.start, a.stop)]


def advantage_of_token(case: Case) -> dict[int, float]:
    return {t: A for a, A in grpo_advantages(case).items() for t in range(a.start, a.stop)}


def gspo(case: Case, z: Complex, level: str, low: float, high: float, negative_only: bool = False) -> Any:
    logp, old = case.logp(z), case.logp(case.z_old)
    advantage = grpo_advantages(case)

    def term(a: Answer, t: int) -> Any:
        A = min(advantage[a], 0.0) if negative_only else advantage[a]
        tokens = np.arange(a.start, a.stop)
        s = np.exp((logp[..., tokens] - old[tokens]).sum(-1) / a.length)
        if level == "token":
            s = stop(s) * np.exp(logp[..., t] - stop(logp[..., t]))
        return ppo(A, s, low, high)

    return sequence_mean(case, term)


@each_step
@each_case("level", ["sequence", "token"])
@each_case(("low", "high"), [(3e-4, 4e-4), (0.1, 0.15)])
def test_gspo(case: Case, level: str, low: float, high: float) -> None:
    params = {"gspo": GSPOParams(level=level), "clip": ClipParams(low=low, high=high)}
    check(case, lambda c, z: gspo(c, z, level, low, high), ["grpo", "gspo"], params)


@each_step
def test_gspo_n_with_its_own_values(case: Case) -> None:
    check(case, lambda c, z: gspo(c, z, "sequence", 3e-4, 4e-4, negative_only=True), ["gspo_n"])


def negative_terms(case: Case, z: Complex) -> Term:
    logp, old, advantage = case.logp(z), case.logp(case.z_old), grpo_advantages(case)
    return lambda a, t: ppo(min(advantage[a], 0.0), np.exp(logp[..., t] - old[t]), 0.2, 0.2)


@each_step
def test_grpo_n(case: Case) -> None:
    check(case, lambda c, z: sequence_mean(c, negative_terms(c, z)), ["grpo_n"])


@each_step
def test_negative_only_under_the_token_mean(case: Case) -> None:
    result = check(case, lambda c, z: token_mean(c, negative_terms(c, z)), ["grpo", "negative_only"])
    assert 0.1 < result.metrics["method/negative_only/kept"] < 0.9


@each_step
@each_case(("low", "high"), [(1.0, 0.2), (0.15, 0.1)])
def test_cispo(case: Case, low: float, high: float) -> None:
    def oracle(c: Case, z: Complex) -> Any:
        logp, old, advantage = c.logp(z), c.logp(c.z_old), grpo_advantages(c)

        def term(a: Answer, t: int) -> Any:
            weight = np.clip(np.exp(stop(logp[..., t]) - old[t]), 1 - low, 1 + high)
            return -weight * advantage[a] * logp[..., t]

        return token_mean(c, term)

    check(case, oracle, ["grpo", "cispo"], {"cispo": CISPOParams(low=low, high=high)})


@each_step
def test_reinforce(case: Case) -> None:
    def oracle(c: Case, z: Complex) -> Any:
        logp, advantage = c.logp(z), grpo_advantages(c)
        return token_mean(c, lambda a, t: -advantage[a] * logp[..., t])

    check(case, oracle, ["grpo", "reinforce"])


def covariances(case: Case) -> dict[int, float]:
    """Per scored token: (A - mean A) (log pi_old - mean log pi_old)."""
    old, advantage, tokens = case.logp(case.z_old), advantage_of_token(case), scored_tokens(case)
    mean_A = sum(advantage[t] for t in tokens) / len(tokens)
    mean_logp = sum(old[t] for t in tokens) / len(tokens)
    return {t: (advantage[t] - mean_A) * (old[t] - mean_logp) for t in tokens}


@each_step
@each_case("share", [0.002, 0.2])
def test_kl_cov(case: Case, share: float) -> None:
    cov = covariances(case)
    top = sorted(cov, key=lambda t: -cov[t])[: max(int(share * case.tokens), 1)]

    def oracle(c: Case, z: Complex) -> Any:
        logp, old, advantage = c.logp(z), c.logp(c.z_old), grpo_advantages(c)

        def term(a: Answer, t: int) -> Any:
            log_rho = logp[..., t] - old[t]
            return -advantage[a] * np.exp(log_rho) + (0.6 * absolute(log_rho) if t in top else 0.0)

        return token_mean(c, term)

    result = check(case, oracle, ["grpo", "kl_cov"], {"kl_cov": KLCovParams(share=share, coefficient=0.6)})
    assert result.metrics["method/kl_cov/penalised"] == pytest.approx(len(top) / case.tokens)


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def draw(seed: int, position: int) -> int:
    """The order of the draws, as integers: the seed mixed once, then the position."""
    return splitmix((splitmix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & WORD) >> 12


@each_step
@each_case(("share", "low", "high"), [(0.05, 0.1, 0.9), (0.3, -10.0, 10.0), (2e-4, 0.2, 5.0)])
def test_clip_cov(case: Case, share: float, low: float, high: float) -> None:
    cov = covariances(case)
    draws = {t: draw(a.seed, CHOICE + t - a.start) for a in case.scored for t in range(a.start, a.stop)}
    candidates = sorted((t for t in cov if low < cov[t] < high), key=lambda t: draws[t])
    left_out = candidates[: max(int(share * case.tokens), 1)]
    assert len(candidates) > len(left_out)

    def oracle(c: Case, z: Complex) -> Any:
        logp, old, advantage = c.logp(z), c.logp(c.z_old), grpo_advantages(c)
        return token_mean(
            c, lambda a, t: 0.0 if t in left_out else ppo(advantage[a], np.exp(logp[..., t] - old[t]), 1.0, 1.0)
        )

    params = {"clip_cov": ClipCovParams(share=share, low=low, high=high)}
    result = check(case, oracle, ["grpo", "clip_cov"], params)
    assert result.metrics["policy/clip_cov"] == pytest.approx(len(left_out) / case.tokens)


@each_step
@each_case("share", [0.2, 0.55])
def test_forking_tokens(case: Case, share: float) -> None:
    entropy = case.entropy(case.z_old)
    top = sorted(scored_tokens(case), key=lambda t: -entropy[t])[: int(np.ceil(share * case.tokens))]

    def oracle(c: Case, z: Complex) -> Any:
        logp, old, advantage = c.logp(z), c.logp(c.z_old), advantage_of_token(c)
        return sum(ppo(advantage[t], np.exp(logp[..., t] - old[t]), 0.2, 0.28) for t in top) / len(top)

    params = {"forking_tokens": ForkingTokensParams(share=share), "clip": ClipParams(low=0.2, high=0.28)}
    check(case, oracle, ["grpo", "forking_tokens"], params)


@each_step
@each_case("level", ["token", "sequence", "geometric"])
@each_case("mode", ["truncate", "mask"])
@each_case(("low", "high"), [(0.0, 2.0), (0.7, 1.3)])
def test_truncated_is(case: Case, level: str, mode: str, low: float, high: float) -> None:
    old = case.logp(case.z_old)

    def weight(a: Answer, t: int) -> float:
        gap = {u: old[u] - case.sampler_logp[u] for u in range(a.start, a.stop)}
        total = sum(gap.values())
        w = float(np.exp({"token": gap[t], "sequence": total, "geometric": total / a.length}[level]))
        if mode == "mask":
            return w if low <= w <= high else 0.0
        return min(max(w, low), high)

    def oracle(c: Case, z: Complex) -> Any:
        logp, advantage = c.logp(z), grpo_advantages(c)
        return token_mean(c, lambda a, t: weight(a, t) * ppo(advantage[a], np.exp(logp[..., t] - old[t]), 0.2, 0.2))

    params = {"truncated_is": TruncatedISParams(level=level, mode=mode, low=low, high=high)}
    result = check(case, oracle, ["grpo", "truncated_is"], params)
    applied = [weight(a, t) for a in case.scored for t in range(a.start, a.stop)]
    assert result.metrics["method/truncated_is/weight"] == pytest.approx(np.mean(applied), rel=1e-10)


@each_step
@each_case("against", [None, "sampler", "policy"])
def test_bypass(case: Case, against: str | None) -> None:
    recorded = case.engine_logp if against == "policy" else case.sampler_logp

    def oracle(c: Case, z: Complex) -> Any:
        logp, advantage = c.logp(z), grpo_advantages(c)
        return token_mean(c, lambda a, t: ppo(advantage[a], np.exp(logp[..., t] - recorded[t]), 0.2, 0.2))

    check(case, oracle, ["grpo", "bypass"], {"bypass": ComparedParams(against=against)})


@each_step
@each_case("level", ["token", "sequence", "geometric"])
def test_weight_against_the_policy_beside_dlc(case: Case, level: str) -> None:
    """Beside dlc the weight is against the policy's own record unless told; CISPO's loss has it as a factor too."""
    old, low, high = case.logp(case.z_old), 0.95, 1.02

    def oracle(c: Case, z: Complex) -> Any:
        logp, advantage = c.logp(z), grpo_advantages(c)

        def term(a: Answer, t: int) -> Any:
            gap = {u: old[u] - c.engine_logp[u] for u in range(a.start, a.stop)}
            total = {"token": gap[t], "sequence": sum(gap.values()), "geometric": sum(gap.values()) / a.length}[level]
            ratio = stop(np.exp(logp[..., t] - old[t]))
            return -min(max(float(np.exp(total)), low), high) * np.minimum(ratio, 1.3) * advantage[a] * logp[..., t]

        return token_mean(c, term)

    params = {"truncated_is": TruncatedISParams(level=level, low=low, high=high), "cispo": CISPOParams(high=0.3)}
    check(case, oracle, ["grpo", "cispo", "dlc", "truncated_is"], params, reduction=Reduction.TOKEN_MEAN)


@each_step
@each_case("level", ["token", "sequence", "geometric"])
@each_case(("against", "low", "high", "k3"), [("sampler", 0.9, 1.1, None), ("policy", 0.0, 99.0, 5e-5)])
def test_ratio_mask(case: Case, against: str, level: str, low: float, high: float, k3: float | None) -> None:
    old, recorded = case.logp(case.z_old), case.engine_logp if against == "policy" else case.sampler_logp
    if level == "sequence" and k3 is not None:
        k3 *= 4.0

    def kept(a: Answer, t: int) -> bool:
        ratios = [np.exp(old[u] - recorded[u]) for u in ([t] if level == "token" else range(a.start, a.stop))]
        divergence = sum(r - 1.0 - np.log(r) for r in ratios)
        product = np.prod(ratios)
        if level == "geometric":
            divergence, product = divergence / a.length, product ** (1.0 / a.length)
        return bool(low <= product <= high and (k3 is None or divergence <= k3))

    def oracle(c: Case, z: Complex) -> Any:
        logp, advantage = c.logp(z), grpo_advantages(c)
        return token_mean(c, lambda a, t: kept(a, t) * ppo(advantage[a], np.exp(logp[..., t] - old[t]), 0.2, 0.2))

    params = {"ratio_mask": RatioMaskParams(against=against, level=level, low=low, high=high, k3=k3)}
    result = check(case, oracle, ["grpo", "ratio_mask"], params)
    dropped = [not kept(a, t) for a in case.scored for t in range(a.start, a.stop)]
    assert 0.0 < np.mean(dropped) < 1.0
    assert result.metrics["method/ratio_mask/dropped"] == pytest.approx(np.mean(dropped), rel=1e-10)


@each_step
@each_case(("against", "threshold"), [("sampler", 0.1), ("policy", 0.02)])
@each_case("surrogate", ["clip", "gspo"])
def test_off_policy_mask(case: Case, against: str, threshold: float, surrogate: str) -> None:
    """The distance is to the present policy, whose gradient does not pass through the mask."""
    old, recorded = case.logp(case.z_old), case.engine_logp if against == "policy" else case.sampler_logp
    present, advantage = case.logp(case.z), grpo_advantages(case)

    def kept(a: Answer) -> bool:
        gap = sum(recorded[u] - present[u] for u in range(a.start, a.stop)) / max(a.length, 1)
        return bool(advantage[a] >= 0 or gap <= threshold)

    def oracle(c: Case, z: Complex) -> Any:
        logp = c.logp(z)

        def term(a: Answer, t: int) -> Any:
            tokens = np.arange(a.start, a.stop) if surrogate == "gspo" else np.array([t])
            ratio = np.exp((logp[..., tokens] - old[tokens]).mean(-1))
            return kept(a) * ppo(advantage[a], ratio, 0.2, 0.2)

        return token_mean(c, term)

    params = {
        "off_policy_mask": OffPolicyMaskParams(against=against, threshold=threshold),
        "clip": ClipParams(low=0.2, high=0.2),
    }
    check(case, oracle, ["grpo", surrogate, "off_policy_mask"], params, reduction=Reduction.TOKEN_MEAN)
    assert sum(not kept(a) for a in case.scored if a.length) > 0


@each_step
@each_case("coefficient", [0.0, 0.7])
def test_several_at_once(case: Case, coefficient: float) -> None:
    """GSPO-N, a weight per response for the sampler, and an entropy bonus."""

    def oracle(c: Case, z: Complex) -> Any:
        logp, old, entropy, advantage = c.logp(z), c.logp(c.z_old), c.entropy(z), grpo_advantages(c)

        def term(a: Answer, t: int) -> Any:
            tokens = np.arange(a.start, a.stop)
            s = np.exp((logp[..., tokens] - old[tokens]).sum(-1) / a.length)
            w = min(float(np.exp((old[tokens] - c.sampler_logp[tokens]).sum())), 2.0)
            return w * ppo(min(advantage[a], 0.0), s, 0.1, 0.1) - coefficient * entropy[..., t]

        return sequence_mean(c, term)

    params = {
        "truncated_is": TruncatedISParams(level="sequence"),
        "clip": ClipParams(low=0.1, high=0.1),
        "entropy_bonus": EntropyBonusParams(coefficient=coefficient),
    }
    names = ["gspo_n", "truncated_is", "entropy_bonus"]
    check(case, oracle, names, params, reduction=Reduction.SEQ_MEAN_TOKEN_MEAN)
