"""Random trials of Theorems 3.1, 3.2, C.1 and 3.3 and of what the paper concludes from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from megasharp.labs.bounds import sharpening as s
from megasharp.labs.check import Check, at_most, never
from megasharp.labs.tilting import Bools, Counts, Floats, log_partition, tilt

# The paper runs no such trials; sizes and ranges are ours, wide enough to meet both confident and spread policies.
MODES = 8
GROUPS = (2, 4, 8, 16, 64)
CONCENTRATIONS = (0.2, 1.0, 5.0)
# Share of the uniform policy in every reference: no mode is so rare that exponents n A / (G beta pi) leave float64.
FLOOR = 0.01
BETA = (0.05, 5.0)
ADVANTAGE = 2.0
LEARNING_RATE = 1e-4
# For the limit of a large batch.
LARGE_GROUP = 10**7


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """Random queries with a sampled batch each; some counts follow the reference, some are arbitrary."""

    reference_M: Floats
    correct_M: Bools
    count_M: Counts
    positive: Floats
    negative: Floats
    beta: Floats

    @property
    def advantage_M(self) -> Floats:
        """Shared by the correct modes, and by the incorrect ones."""
        return s.binary_advantages(self.correct_M, self.positive, self.negative)


def random_cases(trials: int, rng: Generator) -> Cases:
    """`trials` cases of 8 modes, 1 to 7 of them correct."""
    reference_M = rng.dirichlet(np.ones(MODES), trials)
    for start, concentration in enumerate(CONCENTRATIONS):
        part = slice(start, None, len(CONCENTRATIONS))
        reference_M[part] = rng.dirichlet(np.full(MODES, concentration), len(reference_M[part]))
    reference_M = (1 - FLOOR) * reference_M + FLOOR / MODES
    correct = rng.integers(1, MODES, trials)
    order_M = rng.permuted(np.tile(np.arange(MODES), (trials, 1)), axis=-1)
    group = rng.choice(GROUPS, trials)
    drawn_M = rng.multinomial(group, reference_M)
    arbitrary_M = rng.multinomial(group, rng.dirichlet(np.ones(MODES), trials))
    from_reference = rng.random(trials) < 0.5
    count_M = np.where(from_reference[:, None], drawn_M, arbitrary_M)
    positive, negative = rng.uniform(0, ADVANTAGE, trials), -rng.uniform(0, ADVANTAGE, trials)
    beta = np.exp(rng.uniform(np.log(BETA[0]), np.log(BETA[1]), trials))
    return Cases(reference_M, order_M < correct[:, None], count_M, positive, negative, beta)


def policy_checks(trials: int, rng: Generator) -> list[Check]:
    """Every check of this module on one set of random cases."""
    cases = random_cases(trials, rng)
    return [*_optimum(cases, rng), *_batch_optimum(cases, rng), *_update(cases), *_partition(cases)]


def _optimum(cases: Cases, rng: Generator) -> list[Check]:
    advantage_M = rng.normal(size=cases.reference_M.shape)
    best_M = s.optimal_policy(cases.reference_M, advantage_M, cases.beta)
    binary_M = s.optimal_policy(cases.reference_M, cases.advantage_M, cases.beta)
    shrunk = s.is_over_sharpened(binary_M, cases.reference_M, cases.correct_M)
    # Any advantages that are >= 0 on correct modes, but not the same for all of them.
    unequal_M = np.where(cases.correct_M, np.abs(advantage_M), -np.abs(advantage_M))
    unequal = s.is_over_sharpened(
        s.optimal_policy(cases.reference_M, unequal_M, cases.beta), cases.reference_M, cases.correct_M
    )
    return [
        _beats_others("Thm 3.1", "maximises equation 1", best_M, cases, advantage_M, rng),
        never("Cor 3.1", "the optimum sharpens moderately (binary advantages)", shrunk),
        never("Cor 3.1", "the same where correct modes' advantages differ (outside its assumption)", unequal),
    ]


def _beats_others(where: str, statement: str, best_M: Floats, cases: Cases, gain_M: Floats, rng: Generator) -> Check:
    """No random policy, near or far, has a larger objective than `best_M`."""
    scale = 10 ** rng.uniform(-3, 0.5, (len(best_M), 1))
    rival_M = tilt(best_M, scale * rng.normal(size=best_M.shape))
    rival = s.objective(rival_M, cases.reference_M, gain_M, cases.beta)
    return at_most(where, statement, rival, s.objective(best_M, cases.reference_M, gain_M, cases.beta))


def _batch_optimum(cases: Cases, rng: Generator) -> list[Check]:
    reference_M, beta = cases.reference_M, cases.beta
    batch_M = s.batch_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    gain_M = s.batch_exponent(cases.advantage_M, cases.count_M, beta) * beta[:, None]
    ratio_M = s.ratio_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    grown_M = cases.correct_M & (cases.count_M > 0)
    return [
        _beats_others(
            "Thm 3.2", "maximises the linear surrogate sum n A pi / G - beta KL", batch_M, cases, gain_M, rng
        ),
        _beats_others("Thm 3.2", "maximises the importance-ratio surrogate", batch_M, cases, gain_M / reference_M, rng),
        _beats_others("(ours)", "ratio policy maximises that surrogate", ratio_M, cases, gain_M / reference_M, rng),
        never("sec 3.2", "sampled correct modes gain", s.is_over_sharpened(batch_M, reference_M, grown_M)),
    ]


def _update(cases: Cases) -> list[Check]:
    """Theorem C.1 for a step in function space, which it names, and for one on the logits of a softmax."""
    reference_M, beta = cases.reference_M, cases.beta
    current_M = tilt(reference_M, np.sin(np.arange(MODES)) * np.ones_like(reference_M))
    target_M = s.batch_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    gain_M = s.batch_exponent(cases.advantage_M, cases.count_M, beta) * beta[:, None]
    gradient_M = s.functional_gradient(current_M, reference_M, gain_M, beta)
    logit_M = current_M * (gradient_M - (current_M * gradient_M).sum(-1, keepdims=True))
    interpolated_M = s.interpolate(current_M, target_M, LEARNING_RATE * beta)
    moved = np.abs(interpolated_M - current_M).sum(-1)
    allowed = 1e-6 * moved
    functional = np.abs(tilt(current_M, LEARNING_RATE * gradient_M) - interpolated_M).sum(-1)
    plain = np.abs(tilt(current_M, LEARNING_RATE * logit_M) - interpolated_M).sum(-1)
    return [
        at_most("Thm C.1", "equals a step along the functional (natural) gradient", functional, allowed),
        at_most("Thm C.1", "equals a small plain gradient step on softmax logits", plain, allowed),
    ]


def _partition(cases: Cases) -> list[Check]:
    reference_M, beta, correct_M, count_M = cases.reference_M, cases.beta, cases.correct_M, cases.count_M
    bound = s.partition_lower_bound(reference_M, correct_M, count_M, cases.positive, cases.negative, beta)
    normalised_M = s.normalised_advantages(correct_M, count_M)
    partition = s.batch_partition(reference_M, normalised_M, count_M, beta)
    gap = s.probability_gap(reference_M, correct_M, count_M)
    mixed = np.isfinite(gap)
    tight = s.normalised_partition_lower_bound(reference_M, correct_M, count_M, beta)
    policy_M = s.batch_policy(reference_M, normalised_M, count_M, beta)
    unsampled_M = count_M == 0
    wide, narrow = mixed & (gap > 0), mixed & (gap < 0)
    kept = (unsampled_M & (policy_M >= reference_M)).any(-1)
    ideal = log_partition(reference_M, s.ratio_exponent(reference_M, normalised_M, count_M, beta))
    return [
        at_most("Thm 3.3", "Z >= first bound", bound, s.batch_partition(reference_M, cases.advantage_M, count_M, beta)),
        at_most("Thm 3.3", "Z >= 1 + (s / beta) gap", tight[mixed], partition[mixed]),
        never("Thm 3.3", "gap > 0 shrinks every unsampled mode", kept[wide]),
        never("Thm 3.3", "gap < 0 leaves Z <= 1 (the converse)", partition[narrow] > 1),
        at_most("sec 4.1", "Z >= 1 under the idealised A / pi_ref", np.zeros(mixed.sum()), ideal[mixed]),
        at_most("sec 4.1", "the idealised A / pi_ref lowers Z", ideal[wide], np.log(partition)[wide]),
    ]


def partition_cases(trials: int, rng: Generator) -> tuple[Floats, Floats]:
    """Second bound of Theorem 3.3 and Z, for the batches that have correct and incorrect samples."""
    cases = random_cases(trials, rng)
    advantage_M = s.normalised_advantages(cases.correct_M, cases.count_M)
    bound = s.normalised_partition_lower_bound(cases.reference_M, cases.correct_M, cases.count_M, cases.beta)
    mixed = np.isfinite(bound)
    partition = s.batch_partition(cases.reference_M, advantage_M, cases.count_M, cases.beta)
    return bound[mixed], partition[mixed]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Shares of queries whose policy is over-sharpened, at one group size, and distances from Theorem 3.1's optimum."""

    group: int
    batch: float
    ratio: float
    batch_distance: float
    ratio_distance: float


def over_sharpening(group: int, trials: int, rng: Generator) -> Sharing:
    """Batches of `group` samples from the reference, normalised advantages; distances are total variation."""
    cases = random_cases(trials, rng)
    reference_M, correct_M = cases.reference_M, cases.correct_M
    count_M = rng.multinomial(np.full(trials, group), reference_M)
    advantage_M = s.normalised_advantages(correct_M, count_M)
    exact_M = _exact_optimum(cases)
    batch_M = s.batch_policy(reference_M, advantage_M, count_M, cases.beta)
    ratio_M = s.ratio_policy(reference_M, advantage_M, count_M, cases.beta)
    return Sharing(
        group,
        float(s.is_over_sharpened(batch_M, reference_M, correct_M).mean()),
        float(s.is_over_sharpened(ratio_M, reference_M, correct_M).mean()),
        float(np.abs(batch_M - exact_M).sum(-1).mean() / 2),
        float(np.abs(ratio_M - exact_M).sum(-1).mean() / 2),
    )


def _exact_optimum(cases: Cases) -> Floats:
    """Theorem 3.1's policy with the advantages of an infinite batch."""
    accuracy = (cases.reference_M * cases.correct_M).sum(-1)
    sigma = np.sqrt(accuracy * (1 - accuracy))
    advantage_M = s.binary_advantages(cases.correct_M, (1 - accuracy) / sigma, -accuracy / sigma)
    return s.optimal_policy(cases.reference_M, advantage_M, cases.beta)
