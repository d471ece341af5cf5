"""GRPO, the clipped surrogate, the penalty to a reference, and the four reductions."""

from __future__ import annotations

import math

import numpy as np
from cases import each_case
from harness import HORIZON, Answer, Case, Complex, check, clip, each_step, maximum, minimum, random_case, run

from megasharp.algos.base import Reduction
from megasharp.algos.clip import ClipParams
from megasharp.algos.grpo import GRPOParams
from megasharp.algos.kl import KLParams

# Tight bounds, so that many tokens are clipped on either side.
TIGHT = ClipParams(low=0.1, high=0.15)


def grpo_advantages(case: Case, unbiased: bool = True) -> dict[Answer, float]:
    """Per scored response: (r - mean) / (std + 1e-6), zero in uniform groups."""
    found = {}
    for group in case.groups:
        rewards = [answer.reward for answer in group]
        for answer in group:
            uniform = len(set(rewards)) == 1
            std = 1.0 if uniform else float(np.std(rewards, ddof=1 if unbiased else 0))
            found[answer] = 0.0 if uniform else (answer.reward - float(np.mean(rewards))) / (std + 1e-6)
    return found


def clipped(case: Case, z: Complex, low: float, high: float, dual: float | None, coefficient, unbiased: bool = True):
    """Sum over scored tokens of coefficient(answer) * max(-A rho, -A clip(rho))."""
    logp, old = case.logp(z), case.logp(case.z_old)
    advantage = grpo_advantages(case, unbiased)
    total = 0.0
    for answer in case.scored:
        A = advantage[answer]
        for t in range(answer.start, answer.stop):
            rho = np.exp(logp[..., t] - old[t])
            loss = maximum(-A * rho, -A * clip(rho, 1 - low, 1 + high))
            if dual is not None and A < 0:
                loss = minimum(loss, -A * dual + 0 * rho)
            total = total + coefficient(answer) * loss
    return total


def token_mean(case: Case):
    return lambda answer: 1.0 / case.tokens


@each_step
def test_grpo_with_separate_bounds(case: Case) -> None:
    result = check(case, lambda c, z: clipped(c, z, 0.1, 0.15, None, token_mean(c)), ["grpo"], {"clip": TIGHT})
    assert result.metrics["policy/clip_high"] > 0.05 and result.metrics["policy/clip_low"] > 0.05


@each_step
def test_dual_clip(case: Case) -> None:
    params = {"clip": ClipParams(low=0.1, high=0.15, dual=1.3), "grpo": GRPOParams(std="population")}
    check(case, lambda c, z: clipped(c, z, 0.1, 0.15, 1.3, token_mean(c), unbiased=False), ["grpo"], params)


@each_step
@each_case("reduction", Reduction)
def test_reductions(case: Case, reduction: Reduction) -> None:
    sequences = sum(1 for a in case.scored if a.length)

    def coefficient(answer) -> float:
        return {
            Reduction.TOKEN_MEAN: 1.0 / case.tokens,
            Reduction.SEQ_MEAN_TOKEN_MEAN: 1.0 / (sequences * max(answer.length, 1)),
            Reduction.SEQ_MEAN_TOKEN_SUM: 1.0 / sequences,
            Reduction.TOKEN_SUM_OVER_CONSTANT: 1.0 / (sequences * HORIZON),
        }[reduction]

    check(case, lambda c, z: clipped(c, z, 0.2, 0.2, None, coefficient), ["grpo"], reduction=reduction)


@each_step
@each_case("form", ["k1", "k2", "k3"])
def test_penalty_to_the_reference(case: Case, form: str) -> None:
    def oracle(c: Case, z: Complex):
        logp, ref = c.logp(z), c.logp(c.z_ref)
        total = clipped(c, z, 0.2, 0.2, None, token_mean(c))
        for answer in c.scored:
            for t in range(answer.start, answer.stop):
                d = ref[t] - logp[..., t]
                total = total + 0.3 / c.tokens * {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[form]
        return total

    check(case, oracle, ["grpo", "kl"], {"kl": KLParams(coefficient=0.3, form=form)})


def test_the_complex_step_agrees_with_finite_differences() -> None:
    """The harness itself: the oracle's gradient against central differences of the oracle's value."""
    from harness import value_and_gradient

    case = random_case(0)

    def oracle(c: Case, z: Complex):
        return clipped(c, z, 0.2, 0.2, None, token_mean(c))

    _, gradient = value_and_gradient(oracle, case)
    step = 1e-6
    for t, v in [(0, 0), (3, 4), (11, 8), (case.T - 1, 2)]:
        up, down = case.z.astype(complex), case.z.astype(complex)
        up[t, v] += step
        down[t, v] -= step
        difference = (oracle(case, up) - oracle(case, down)).real / (2 * step)
        assert math.isclose(difference, gradient[t, v], rel_tol=1e-5, abs_tol=1e-9)


def test_infra_failures_count_nowhere() -> None:
    """The case holds one; its tokens have no gradient."""
    case = random_case(1)
    gradient = run(case, ["grpo"]).gradient
    (failed,) = [answer for answer in case.answers if not answer.scored]
    assert failed.length > 0 and (gradient[failed.start : failed.stop] == 0).all()
