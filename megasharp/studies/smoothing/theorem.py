"""Theorem B.10 of arXiv 2511.19942: does smoothing dominate the entropy bonus at the same distance from the base?

For a bonus policy with divergence D from the base, the theorem promises parameters (beta' > 0, gamma' >= 0) of equation
3 with no larger divergence, no less correctness and no larger normalised variance. Its proof takes gamma' / beta' =
gamma / beta and equal correctness. Then both policies agree on the correct trajectories, smoothing keeps the base's
proportions on the incorrect ones, and by Jensen no f-divergence can be larger. But the beta' this asks for is positive
only where sum_I base^(1 - gamma / beta) < e^(1 / beta) sum_I base (`matching_rate`): roughly, where the bonus
gamma * (-log base) of incorrect trajectories stays below the reward 1. Elsewhere `can_dominate` says whether any
(beta', gamma') keeps the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megasharp.studies.claims import (
    Check,
    at_most,
    never,
)
from megasharp.studies.smoothing import policies as p
from megasharp.studies.smoothing.policies import DIVERGENCES
from megasharp.studies.smoothing.trials import Cases
from megasharp.studies.softmax import (
    Bools,
    Floats,
)

# Allowed relative excess of a divergence in `can_dominate`, so that rounding cannot make a counter-example.
SLACK = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Per case: whether the proof's choice `exists`, and per divergence whether any smoothing keeps the promise.

    `pressure` is gamma * mean(-log base) over incorrect trajectories: the bonus they get, beside a reward of 1.
    `checks` try the proof's choice where it exists.
    """

    exists: Bools
    pressure: Floats
    checks: tuple[Check, ...]
    dominated: dict[str, Bools]


def compare(cases: Cases) -> Comparison:
    """Theorem B.10 on every case, at the tightest budget: the bonus policy's own divergence."""
    base_N, correct_N = cases.base_N, cases.correct_N
    bonus_N = p.entropy_policy(base_N, cases.reward_N, cases.beta, cases.gamma)
    rate = p.matching_rate(base_N, correct_N, cases.beta, cases.gamma)
    exists = rate > 0
    incorrect_N = base_N * ~correct_N / (base_N * ~correct_N).sum(-1, keepdims=True)
    pressure = -cases.gamma * (incorrect_N * np.log(base_N)).sum(-1)
    checks = _proof_checks(cases, bonus_N, rate, exists)
    dominated = can_dominate(base_N, correct_N, bonus_N, cases.gamma / cases.beta)
    return Comparison(exists, pressure, checks, dominated)


def _proof_checks(cases: Cases, bonus_N: Floats, rate: Floats, exists: Bools) -> tuple[Check, ...]:
    """The proof's choice, where it exists, against what it promises."""
    base_N, correct_N, bonus_N = cases.base_N[exists], cases.correct_N[exists], bonus_N[exists]
    right = p.correctness(bonus_N, correct_N)
    beta = 1 / rate[exists]
    positive = beta * (cases.gamma / cases.beta)[exists]
    smooth_N = p.smoothed_policy(base_N, correct_N, beta, positive, np.zeros_like(beta))
    where = "Thm B.10"
    return (
        never(where, "the proof's choice of beta' exists", ~exists),
        at_most(where, "there: correctness not lower", right, p.correctness(smooth_N, correct_N)),
        at_most(
            where,
            "there: normalised variance not higher",
            p.normalised_variance(smooth_N, correct_N),
            p.normalised_variance(bonus_N, correct_N) + SLACK,
        ),
        *(
            at_most(where, f"there: {name} not higher", d(smooth_N, base_N), d(bonus_N, base_N) + SLACK)
            for name, d in DIVERGENCES.items()
        ),
    )


def can_dominate(base_N: Floats, correct_N: Bools, bonus_N: Floats, ratio: Floats) -> dict[str, Bools]:
    """Per divergence, whether any beta' > 0 and gamma' >= 0 does what the theorem promises.

    `ratio` = gamma / beta < 1 of the bonus policy; the correct trajectories must not be all equally likely. The
    closure beta' -> infinity is included, in the theorem's favour. It is enough to look at gamma' / beta' =
    gamma / beta [ours]: a smaller one has more normalised variance, and a larger one moves the correct trajectories
    further from the base (in each of the four divergences) and raises the least correctness that a beta' > 0 can have.
    """
    wanted = p.correctness(bonus_N, correct_N)
    lowest = np.maximum(wanted, least_correctness(base_N, correct_N, ratio))
    least = {name: _least(name, base_N, correct_N, 1 - ratio, lowest) for name in DIVERGENCES}
    return {name: least[name] <= d(bonus_N, base_N) * (1 + SLACK) for name, d in DIVERGENCES.items()}


def least_correctness(base_N: Floats, correct_N: Bools, ratio: Floats) -> Floats:
    """Smoothing's correctness for beta' -> infinity at gamma' / beta' = `ratio`; any beta' > 0 has more."""
    inside = np.where(correct_N, base_N ** (1 - ratio[..., None]), 0.0).sum(-1)
    least: Floats = inside / (inside + (base_N * ~correct_N).sum(-1))
    return least


def _least(name: str, base_N: Floats, correct_N: Bools, exponent: Floats, lowest: Floats) -> Floats:
    """The least divergence among smoothing's policies of that exponent with at least `lowest` correctness.

    At given proportions every divergence is convex in the correctness c, with its minimum at the odds
    (base odds) * factor; the least is at that minimum or, where that is out of reach, at `lowest`.
    """
    unit_N = p.compose(base_N, correct_N, np.full_like(exponent, 0.5), exponent, np.ones_like(exponent))
    inside = p.correctness(base_N, correct_N)
    given_N = np.where(correct_N, 2 * unit_N, 0.0)
    origin_N = np.where(correct_N, base_N / inside[..., None], 0.0)
    factor = _FACTORS[name](given_N, origin_N, correct_N)
    odds = inside / (1 - inside) * factor
    right = np.maximum(lowest, odds / (1 + odds))
    return DIVERGENCES[name](p.compose(base_N, correct_N, right, exponent, np.ones_like(exponent)), base_N)


def _chi_square_factor(top_N: Floats, bottom_N: Floats, correct_N: Bools) -> Floats:
    """1 + chi2 of the conditional distributions over the correct trajectories."""
    total: Floats = np.divide(np.square(top_N), bottom_N, out=np.zeros_like(top_N), where=correct_N).sum(-1)
    return total


def _kl_factor(given_N: Floats, origin_N: Floats, correct_N: Bools) -> Floats:
    ratio_N = np.divide(given_N, origin_N, out=np.ones_like(given_N), where=correct_N)
    factor: Floats = np.exp(-(given_N * np.log(ratio_N)).sum(-1))
    return factor


# Where d divergence / d c = 0, with q = given and b = base among the correct:
# e^(-KL(q || b)), 1, 1 / (1 + chi2(q || b)), sqrt(1 + chi2(b || q)).
_FACTORS: dict[str, Callable[[Floats, Floats, Bools], Floats]] = {
    "reverse KL": _kl_factor,
    "forward KL": lambda given_N, origin_N, correct_N: np.ones(given_N.shape[:-1]),
    "reverse chi2": lambda given_N, origin_N, correct_N: 1 / _chi_square_factor(given_N, origin_N, correct_N),
    "forward chi2": lambda given_N, origin_N, correct_N: np.sqrt(_chi_square_factor(origin_N, given_N, correct_N)),
}


def frontier(base_N: Floats, correct_N: Bools, budget: float, smooth: bool) -> tuple[Floats, Floats]:
    """(normalised variance, correctness) of the best policies with KL(policy || base) <= `budget`.

    One point per gamma / beta in [0, 1), at the largest 1 / beta up to 60 within the budget; none where none is.
    """
    rates = np.linspace(1e-4, 60, 6000)
    variances, rights = [], []
    for ratio in np.linspace(0, 0.99, 100):
        beta, gamma = 1 / rates, ratio / rates
        base_KN, correct_KN = np.tile(base_N, (rates.size, 1)), np.tile(correct_N, (rates.size, 1))
        if smooth:
            policy_KN = p.smoothed_policy(base_KN, correct_KN, beta, gamma, np.zeros_like(beta))
        else:
            policy_KN = p.entropy_policy(base_KN, correct_KN.astype(np.float64), beta, gamma)
        within = np.flatnonzero(DIVERGENCES["reverse KL"](policy_KN, base_KN) <= budget)
        if within.size:
            best_N = policy_KN[within[-1]]
            variances.append(float(p.normalised_variance(best_N, correct_N)))
            rights.append(float(p.correctness(best_N, correct_N)))
    return np.array(variances), np.array(rights)
