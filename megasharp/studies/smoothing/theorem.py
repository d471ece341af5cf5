"""Random trials of arXiv 2511.19942: its Theorem B.10, then its lemmas and propositions.

Theorem B.10 says that smoothing dominates the entropy bonus at the same distance from the base. For a bonus policy with
divergence D from the base, it promises parameters (beta' > 0, gamma' >= 0) of equation 3 with no larger divergence, no
less correctness and no larger normalised variance. Its proof takes gamma' / beta' = gamma / beta and equal correctness.
Then both policies agree on the correct trajectories, smoothing keeps the base's proportions on the incorrect ones, and
by Jensen no f-divergence can be larger. But the beta' this asks for is positive only where
sum_I base^(1 - gamma / beta) < e^(1 / beta) sum_I base (`matching_rate`): roughly, where the bonus
gamma * (-log base) of incorrect trajectories stays below the reward 1. Elsewhere `can_dominate` says whether any
(beta', gamma') keeps the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.random import Generator

from megasharp.studies.claims import Check, at_most, never
from megasharp.studies.smoothing import policies as p
from megasharp.studies.smoothing.policies import DIVERGENCES
from megasharp.studies.softmax import Bools, Floats, kl, tilt

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
    """Try Theorem B.10 on every case, at the tightest budget: the bonus policy's own divergence."""
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
    """Check the proof's choice, where it exists, against its promises."""
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
    """Return per divergence whether any beta' > 0 and gamma' >= 0 keeps the theorem's promise.

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
    """Return smoothing's correctness for beta' -> infinity at gamma' / beta' = `ratio`; any beta' > 0 has more."""
    inside = np.where(correct_N, base_N ** (1 - ratio[..., None]), 0.0).sum(-1)
    least: Floats = inside / (inside + (base_N * ~correct_N).sum(-1))
    return least


def _least(name: str, base_N: Floats, correct_N: Bools, exponent: Floats, lowest: Floats) -> Floats:
    """Return the least divergence among smoothing's policies of that exponent with correctness >= `lowest`.

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


# The paper runs no such trials; sizes and ranges are ours.
TRAJECTORIES = 24
MOST_CORRECT = 12
SPREAD = (0.1, 3.0)
BETA = (0.05, 5.0)
# gamma_n / beta stays below this: near 1 the on-policy optimum's exponent beta / (beta - gamma_n) leaves float64.
MOST_NEGATIVE = 0.8
# Enumerated: every data set of SAMPLES out of ENUMERATED trajectories.
ENUMERATED, SAMPLES = 5, 5
SAME = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """Random problems with parameters: `gamma` < `beta`, and `negative` < `beta` for the incorrect trajectories."""

    base_N: Floats
    correct_N: Bools
    beta: Floats
    gamma: Floats
    negative: Floats

    @property
    def reward_N(self) -> Floats:
        """1 where correct, with access to all correct trajectories."""
        return self.correct_N.astype(np.float64)


def random_cases(trials: int, rng: Generator) -> Cases:
    """Draw `trials` base policies over 24 trajectories, 2 to 12 of them correct; log-normal, from flat to steep."""
    steepness = rng.uniform(*SPREAD, (trials, 1))
    base_N = tilt(np.ones((trials, TRAJECTORIES)), steepness * rng.normal(size=(trials, TRAJECTORIES)))
    correct_N = np.arange(TRAJECTORIES) < rng.integers(2, MOST_CORRECT + 1, (trials, 1))
    beta = np.exp(rng.uniform(np.log(BETA[0]), np.log(BETA[1]), trials))
    return Cases(base_N, correct_N, beta, beta * rng.random(trials), MOST_NEGATIVE * beta * rng.random(trials))


def trial_checks(trials: int, rng: Generator) -> list[Check]:
    """Run every check of this module on one set of random cases."""
    cases = random_cases(trials, rng)
    return [*_lemmas(cases, rng), *_propositions(cases), *_both_sides(cases), *_on_policy(cases, rng)]


def _lemmas(cases: Cases, rng: Generator) -> list[Check]:
    base_N, correct_N, beta, gamma = cases.base_N, cases.correct_N, cases.beta, cases.gamma
    reward_N, none = rng.normal(size=base_N.shape), np.zeros_like(gamma)
    entropy_N = p.entropy_reward(base_N, cases.reward_N, gamma)
    smoothed_N = p.smoothed_reward(base_N, correct_N, gamma, none)
    # Lemma B.5's policy as the lemma writes it, part by part (`smoothed_policy` tilts by the reward).
    exponent_N = (1 - gamma / beta)[..., None]
    weight_N = np.where(correct_N, base_N**exponent_N * np.exp(1 / beta[..., None]), base_N)
    by_parts_N = weight_N / weight_N.sum(-1, keepdims=True)
    return [
        _beats_others("Lemma B.1", p.vanilla_policy(base_N, reward_N, beta), base_N, reward_N, beta, rng),
        _beats_others("Lemma B.4", p.entropy_policy(base_N, cases.reward_N, beta, gamma), base_N, entropy_N, beta, rng),
        _beats_others("Lemma B.5", by_parts_N, base_N, smoothed_N, beta, rng),
    ]


def _beats_others(where: str, best_N: Floats, base_N: Floats, reward_N: Floats, beta: Floats, rng: Generator) -> Check:
    """Check that no random policy, near or far, has a larger E[reward] - beta KL(policy || base) than `best_N`."""
    rival_N = tilt(best_N, 10 ** rng.uniform(-3, 0.5, (len(best_N), 1)) * rng.normal(size=best_N.shape))
    value = (rival_N * reward_N).sum(-1) - beta * kl(rival_N, base_N)
    best = (best_N * reward_N).sum(-1) - beta * kl(best_N, base_N)
    return at_most(where, "the closed form maximises its objective", value, best)


def _propositions(cases: Cases) -> list[Check]:
    base_N, correct_N = cases.base_N, cases.correct_N
    policy_N = p.vanilla_policy(base_N, cases.reward_N, cases.beta)
    gain_N = policy_N - base_N
    # The first two trajectories are correct.
    larger = np.where(base_N[:, 0] > base_N[:, 1], gain_N[:, 0] < gain_N[:, 1], gain_N[:, 1] < gain_N[:, 0])
    odds = gain_N / base_N
    uneven = np.abs(odds[:, 0] - odds[:, 1])
    sharper = p.normalised_variance(policy_N, correct_N) > p.normalised_variance(base_N, correct_N) * (1 + SAME)
    flatter = p.normalised_variance(policy_N, ~correct_N) < p.normalised_variance(base_N, ~correct_N) * (1 - SAME)
    return [
        never("Prop B.3", "of two correct trajectories the likelier gains more", larger),
        at_most("Prop B.3", "gain / base is the same for both", uneven, SAME * (1 + np.abs(odds[:, 0]))),
        never("sec 3.2", "those gains leave the correct normalised variance as it was", sharper),
        never("sec 3.2", "the incorrect normalised variance falls", ~flatter),
    ]


def _both_sides(cases: Cases) -> list[Check]:
    """Check equation 4 against equation 3: with the same parameters, and at the same correctness."""
    base_N, correct_N, beta, gamma = cases.base_N, cases.correct_N, cases.beta, cases.gamma
    one_N = p.smoothed_policy(base_N, correct_N, beta, gamma, np.zeros_like(gamma))
    two_N = p.smoothed_policy(base_N, correct_N, beta, gamma, cases.negative)
    variance = np.abs(p.normalised_variance(two_N, correct_N) - p.normalised_variance(one_N, correct_N))
    right, exponent = p.correctness(one_N, correct_N), 1 - gamma / beta
    same_N = p.compose(base_N, correct_N, right, exponent, 1 + cases.negative / beta)
    return [
        at_most(
            "sec 3.5",
            "the penalty on incorrect trajectories raises correctness, beta and gamma_p held",
            right,
            p.correctness(two_N, correct_N),
        ),
        at_most("sec 3.5", "and leaves the correct normalised variance", variance, np.full_like(variance, SAME)),
        *(
            at_most("sec 3.5", f"at equal correctness it costs no {name}", d(same_N, base_N), d(one_N, base_N))
            for name, d in DIVERGENCES.items()
        ),
    ]


def _on_policy(cases: Cases, rng: Generator) -> list[Check]:
    """Check Appendix B.3: log policy in place of log base."""
    base_N, correct_N, beta, gamma, negative = (
        cases.base_N, cases.correct_N, cases.beta, cases.gamma, cases.negative
    )  # fmt: skip
    any_N = rng.dirichlet(np.ones(TRAJECTORIES), len(base_N))
    uniform = (any_N * (cases.reward_N - gamma[:, None] * np.log(any_N))).sum(-1) - beta * kl(any_N, base_N)
    rewritten = (any_N * p.entropy_reward(base_N, cases.reward_N, gamma)).sum(-1) - (beta + gamma) * kl(any_N, base_N)
    best_N = p.on_policy_optimum(base_N, correct_N, beta, gamma, negative)
    rival_N = tilt(best_N, 10 ** rng.uniform(-3, 0.5, (len(best_N), 1)) * rng.normal(size=best_N.shape))
    value = p.on_policy_objective(rival_N, base_N, correct_N, beta, gamma, negative)
    best = p.on_policy_objective(best_N, base_N, correct_N, beta, gamma, negative)
    exponent, other = beta / (beta + gamma), beta / (beta - negative)
    rate = p.on_policy_rate(best_N, base_N, correct_N, exponent, other)
    off = np.abs(p.compose(base_N, correct_N, p.correctness(best_N, correct_N), exponent, other) - best_N).sum(-1)
    one_N = p.on_policy_optimum(base_N, correct_N, beta, gamma, np.zeros_like(gamma))
    guess_N = p.smoothed_policy(base_N, correct_N, beta + gamma, gamma, np.zeros_like(gamma))
    rounding = SAME * (1 + np.abs(uniform))
    return [
        at_most("eq 19", "bonus on all: beta' = beta + gamma", np.abs(uniform - rewritten), rounding),
        at_most("(ours)", "the solved policy maximises the two-sided objective", value, best),
        at_most("eq 19", "two-sided: some beta' and gammas give the same policy", off, np.full_like(off, SAME)),
        never("eq 19", "two-sided: that beta' is positive", rate <= 0),
        at_most(
            "eq 19",
            "correct only: beta' = beta + gamma gives the same policy",
            np.abs(one_N - guess_N).sum(-1),
            np.full_like(off, SAME),
        ),
    ]


@dataclass(frozen=True, slots=True)
class Enumeration:
    """One correct trajectory: its exact probability of gaining over all data sets, and Proposition B.2's formula."""

    base: float
    counted: float
    formula: float


def enumerate_improvement(rng: Generator, correct: int) -> tuple[list[Enumeration], float]:
    """Enumerate all data sets of SAMPLES from ENUMERATED trajectories, `correct` of them correct, with exact weights.

    Also returns the probability that the correct normalised variance rises (selection bias at work).
    """
    base_N, beta = rng.dirichlet(np.ones(ENUMERATED)), np.asarray(0.5)
    correct_N = np.arange(ENUMERATED) < correct
    sets = np.array(list(product(range(ENUMERATED), repeat=SAMPLES)))
    weight = base_N[sets].prod(-1)
    count_N = (sets[..., None] == np.arange(ENUMERATED)).sum(1)
    reward_N = p.estimated_reward(correct_N, count_N)
    policy_N = p.vanilla_policy(base_N, reward_N, beta)
    gained_N = policy_N > base_N * (1 + SAME)
    sharper = p.normalised_variance(policy_N, correct_N) > p.normalised_variance(base_N, correct_N) * (1 + SAME)
    found = [
        Enumeration(
            float(base_N[index]),
            float((weight * gained_N[:, index]).sum()),
            float(p.improvement_probability(base_N[index], SAMPLES)),
        )
        for index in np.argsort(base_N[:correct])
    ]
    return found, float((weight * sharper).sum())
