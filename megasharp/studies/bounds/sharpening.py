"""Sharpening of a policy over modes: section 3.2 and appendices A to D of arXiv 2601.15609, as functions.

A query has M modes (classes of responses); an array `x_M` holds one number per mode in its last axis, and leading axes
are independent cases. Probabilities and advantages are float64 without a unit; `correct_M` is bool; `beta` > 0 is the
coefficient of KL(policy || reference); `count_M` says how often each mode was sampled, and its sum is the group size G.

The formulas' symbols are lost in the text we have. Statements that the text makes in words are marked [PAPER], formulas
that we rebuilt from the proofs [DERIVED]. The second half of the file tries Theorems 3.1, 3.2, C.1 and 3.3, and the
paper's conclusions from them, on random cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.random import Generator

from megasharp.studies.claims import Check, at_most, never
from megasharp.studies.softmax import Bools, Counts, Floats, kl, log_partition, tilt

# A probability may lose this much, relatively, by rounding and still count as "not decreased".
ROUNDING = 1e-12


class Sharpening(StrEnum):
    """Definition 3.1 [PAPER]: no correct mode loses probability, or some correct mode does."""

    MODERATE = "moderate"
    OVER = "over"


def is_over_sharpened(policy_M: Floats, reference_M: Floats, correct_M: Bools) -> Bools:
    """Definition 3.1 [PAPER] for many cases at once: some correct mode is less likely than in the reference."""
    lost_M = policy_M < reference_M * (1 - ROUNDING)
    return np.asarray((lost_M & correct_M).any(-1))


def classify(policy_M: Floats, reference_M: Floats, correct_M: Bools) -> Sharpening:
    """Definition 3.1 [PAPER] for one policy over M modes.

    Example: reference (.2, .2, .6), first two modes correct: (.3, .3, .4) is moderate, (.5, .1, .4) is over-sharpening.
    """
    return Sharpening.OVER if is_over_sharpened(policy_M, reference_M, correct_M) else Sharpening.MODERATE


def objective(policy_M: Floats, reference_M: Floats, gain_M: Floats, beta: Floats) -> Floats:
    """Expected gain minus beta KL(policy || reference): equation 1 where `gain_M` is the advantage [PAPER]."""
    value: Floats = (policy_M * gain_M).sum(-1) - beta * kl(policy_M, reference_M)
    return value


def optimal_policy(reference_M: Floats, advantage_M: Floats, beta: Floats) -> Floats:
    """Theorem 3.1 [DERIVED from appendix A]: the maximiser of equation 1, reference * exp(A / beta) / Z."""
    return tilt(reference_M, advantage_M / beta[..., None])


def batch_exponent(advantage_M: Floats, count_M: Counts, beta: Floats) -> Floats:
    """n A / (G beta) per mode: what Theorem 3.2 puts in place of A / beta; 0 for an unsampled mode."""
    group = count_M.sum(-1, keepdims=True)
    exponent: Floats = count_M * advantage_M / (group * beta[..., None])
    return exponent


def batch_policy(reference_M: Floats, advantage_M: Floats, count_M: Counts, beta: Floats) -> Floats:
    """Theorem 3.2 [DERIVED]: the batch-optimal policy, reference * exp(n A / (G beta)) / Z.

    It is the maximiser of the linear surrogate sum_i (n_i A_i / G) policy_i - beta KL. GRPO's own
    surrogates do not converge to it: see `ratio_policy`. Take it as the paper's definition.
    """
    return tilt(reference_M, batch_exponent(advantage_M, count_M, beta))


def batch_partition(reference_M: Floats, advantage_M: Floats, count_M: Counts, beta: Floats) -> Floats:
    """Z of Theorem 3.2; an unsampled mode is scaled by 1 / Z."""
    partition: Floats = np.exp(log_partition(reference_M, batch_exponent(advantage_M, count_M, beta)))
    return partition


def ratio_policy(reference_M: Floats, advantage_M: Floats, count_M: Counts, beta: Floats) -> Floats:
    """The maximiser of the importance-ratio surrogate sum_i (n_i A_i / G) policy_i / reference_i - beta KL [ours].

    This surrogate is GRPO's, unclipped, with samples drawn from the reference; as G grows it becomes equation 1.
    Its exponents are also those of section 4.1's idealised calibration, A / reference.
    """
    return tilt(reference_M, ratio_exponent(reference_M, advantage_M, count_M, beta))


def ratio_exponent(reference_M: Floats, advantage_M: Floats, count_M: Counts, beta: Floats) -> Floats:
    """n A / (G beta reference) per mode."""
    exponent: Floats = batch_exponent(advantage_M, count_M, beta) / reference_M
    return exponent


def interpolate(current_M: Floats, target_M: Floats, step: Floats) -> Floats:
    """Theorem C.1 [DERIVED]: current^(1 - step) * target^step, normalised, with step = learning rate * beta."""
    weight = step[..., None]
    return tilt(current_M, weight * (np.log(target_M) - np.log(current_M)))


def functional_gradient(policy_M: Floats, reference_M: Floats, gain_M: Floats, beta: Floats) -> Floats:
    """Derivative of `objective` with respect to each mode's probability: gain - beta (log(policy / reference) + 1)."""
    gradient: Floats = gain_M - beta[..., None] * (np.log(policy_M / reference_M) + 1)
    return gradient


def binary_advantages(correct_M: Bools, positive: Floats, negative: Floats) -> Floats:
    """`positive` >= 0 for correct modes, `negative` <= 0 for incorrect ones [PAPER]."""
    return np.where(correct_M, positive[..., None], negative[..., None])


def batch_accuracy(correct_M: Bools, count_M: Counts) -> Floats:
    """p: the share of correct samples of a batch."""
    accuracy: Floats = (count_M * correct_M).sum(-1) / count_M.sum(-1)
    return accuracy


def normalised_advantages(correct_M: Bools, count_M: Counts) -> Floats:
    """GRPO's with the population deviation [DERIVED]: (1 - p) / s and -p / s, s = sqrt(p (1 - p)); 0 where s = 0."""
    accuracy = batch_accuracy(correct_M, count_M)
    sigma = np.sqrt(accuracy * (1 - accuracy))
    scale = np.divide(1.0, sigma, out=np.zeros_like(sigma), where=sigma > 0)
    return binary_advantages(correct_M, (1 - accuracy) * scale, -accuracy * scale)


def partition_lower_bound(
    reference_M: Floats, correct_M: Bools, count_M: Counts, positive: Floats, negative: Floats, beta: Floats
) -> Floats:
    """Theorem 3.3, first bound [DERIVED]: Z >= 1 + (A+ sum_correct n pi + A- sum_incorrect n pi) / (G beta)."""
    advantage_M = binary_advantages(correct_M, positive, negative)
    bound: Floats = 1 + (reference_M * batch_exponent(advantage_M, count_M, beta)).sum(-1)
    return bound


def probability_gap(reference_M: Floats, correct_M: Bools, count_M: Counts) -> Floats:
    """Mean reference probability of the correct samples minus that of the incorrect ones [DERIVED].

    NaN where a batch has none of either.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        likely = (count_M * reference_M * correct_M).sum(-1) / (count_M * correct_M).sum(-1)
        unlikely = (count_M * reference_M * ~correct_M).sum(-1) / (count_M * ~correct_M).sum(-1)
    gap: Floats = likely - unlikely
    return gap


def normalised_partition_lower_bound(reference_M: Floats, correct_M: Bools, count_M: Counts, beta: Floats) -> Floats:
    """Theorem 3.3, second bound [DERIVED]: Z >= 1 + (s / beta) * gap, for `normalised_advantages`.

    NaN where a batch is all correct or all incorrect (there s = 0 and Z = 1).
    """
    accuracy = batch_accuracy(correct_M, count_M)
    sigma = np.sqrt(accuracy * (1 - accuracy))
    bound: Floats = 1 + sigma / beta * probability_gap(reference_M, correct_M, count_M)
    return bound


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
        return binary_advantages(self.correct_M, self.positive, self.negative)


def random_cases(trials: int, rng: Generator) -> Cases:
    """Draw `trials` cases of 8 modes, 1 to 7 of them correct."""
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
    """Run every check of this module on one set of random cases."""
    cases = random_cases(trials, rng)
    return [*_optima(cases, rng), *_update(cases), *_partition(cases)]


def _optima(cases: Cases, rng: Generator) -> list[Check]:
    """Check Theorem 3.1's optimum of an infinite batch, then Theorem 3.2's of a finite one."""
    reference_M, correct_M, beta = cases.reference_M, cases.correct_M, cases.beta
    advantage_M = rng.normal(size=reference_M.shape)
    best_M = optimal_policy(reference_M, advantage_M, beta)
    binary_M = optimal_policy(reference_M, cases.advantage_M, beta)
    # Any advantages that are >= 0 on correct modes, but not the same for all of them.
    unequal_M = optimal_policy(reference_M, np.where(correct_M, np.abs(advantage_M), -np.abs(advantage_M)), beta)
    shrunk, unequal = (is_over_sharpened(policy_M, reference_M, correct_M) for policy_M in (binary_M, unequal_M))
    batch_M = batch_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    gain_M = batch_exponent(cases.advantage_M, cases.count_M, beta) * beta[:, None]
    ratio_M = ratio_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    lost = is_over_sharpened(batch_M, reference_M, correct_M & (cases.count_M > 0))
    linear = "maximises the linear surrogate sum n A pi / G - beta KL"
    return [
        _beats_others("Thm 3.1", "maximises equation 1", best_M, cases, advantage_M, rng),
        never("Cor 3.1", "the optimum sharpens moderately (binary advantages)", shrunk),
        never("Cor 3.1", "the same where correct modes' advantages differ (outside its assumption)", unequal),
        _beats_others("Thm 3.2", linear, batch_M, cases, gain_M, rng),
        _beats_others("Thm 3.2", "maximises the importance-ratio surrogate", batch_M, cases, gain_M / reference_M, rng),
        _beats_others("(ours)", "ratio policy maximises that surrogate", ratio_M, cases, gain_M / reference_M, rng),
        never("sec 3.2", "sampled correct modes gain", lost),
    ]


def _beats_others(where: str, statement: str, best_M: Floats, cases: Cases, gain_M: Floats, rng: Generator) -> Check:
    """Check that no random policy, near or far, has a larger objective than `best_M`."""
    scale = 10 ** rng.uniform(-3, 0.5, (len(best_M), 1))
    rival_M = tilt(best_M, scale * rng.normal(size=best_M.shape))
    rival = objective(rival_M, cases.reference_M, gain_M, cases.beta)
    return at_most(where, statement, rival, objective(best_M, cases.reference_M, gain_M, cases.beta))


def _update(cases: Cases) -> list[Check]:
    """Check Theorem C.1 for a step in function space, which it names, and for one on the logits of a softmax."""
    reference_M, beta = cases.reference_M, cases.beta
    current_M = tilt(reference_M, np.sin(np.arange(MODES)) * np.ones_like(reference_M))
    target_M = batch_policy(reference_M, cases.advantage_M, cases.count_M, beta)
    gain_M = batch_exponent(cases.advantage_M, cases.count_M, beta) * beta[:, None]
    gradient_M = functional_gradient(current_M, reference_M, gain_M, beta)
    logit_M = current_M * (gradient_M - (current_M * gradient_M).sum(-1, keepdims=True))
    interpolated_M = interpolate(current_M, target_M, LEARNING_RATE * beta)
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
    bound = partition_lower_bound(reference_M, correct_M, count_M, cases.positive, cases.negative, beta)
    normalised_M = normalised_advantages(correct_M, count_M)
    partition = batch_partition(reference_M, normalised_M, count_M, beta)
    gap = probability_gap(reference_M, correct_M, count_M)
    mixed = np.isfinite(gap)
    tight = normalised_partition_lower_bound(reference_M, correct_M, count_M, beta)
    policy_M = batch_policy(reference_M, normalised_M, count_M, beta)
    unsampled_M = count_M == 0
    wide, narrow = mixed & (gap > 0), mixed & (gap < 0)
    kept = (unsampled_M & (policy_M >= reference_M)).any(-1)
    ideal = log_partition(reference_M, ratio_exponent(reference_M, normalised_M, count_M, beta))
    return [
        at_most("Thm 3.3", "Z >= first bound", bound, batch_partition(reference_M, cases.advantage_M, count_M, beta)),
        at_most("Thm 3.3", "Z >= 1 + (s / beta) gap", tight[mixed], partition[mixed]),
        never("Thm 3.3", "gap > 0 shrinks every unsampled mode", kept[wide]),
        never("Thm 3.3", "gap < 0 leaves Z <= 1 (the converse)", partition[narrow] > 1),
        at_most("sec 4.1", "Z >= 1 under the idealised A / pi_ref", np.zeros(mixed.sum()), ideal[mixed]),
        at_most("sec 4.1", "the idealised A / pi_ref lowers Z", ideal[wide], np.log(partition)[wide]),
    ]


def partition_cases(trials: int, rng: Generator) -> tuple[Floats, Floats]:
    """Second bound of Theorem 3.3 and Z, for the batches that have correct and incorrect samples."""
    cases = random_cases(trials, rng)
    advantage_M = normalised_advantages(cases.correct_M, cases.count_M)
    bound = normalised_partition_lower_bound(cases.reference_M, cases.correct_M, cases.count_M, cases.beta)
    mixed = np.isfinite(bound)
    partition = batch_partition(cases.reference_M, advantage_M, cases.count_M, cases.beta)
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
    """Try batches of `group` samples from the reference, normalised advantages; distances are total variation."""
    cases = random_cases(trials, rng)
    reference_M, correct_M = cases.reference_M, cases.correct_M
    count_M = rng.multinomial(np.full(trials, group), reference_M)
    advantage_M = normalised_advantages(correct_M, count_M)
    # Theorem 3.1's policy with the advantages of an infinite batch.
    accuracy = (reference_M * correct_M).sum(-1)
    sigma = np.sqrt(accuracy * (1 - accuracy))
    infinite_M = binary_advantages(correct_M, (1 - accuracy) / sigma, -accuracy / sigma)
    exact_M = optimal_policy(reference_M, infinite_M, cases.beta)
    batch_M = batch_policy(reference_M, advantage_M, count_M, cases.beta)
    ratio_M = ratio_policy(reference_M, advantage_M, count_M, cases.beta)
    return Sharing(
        group,
        float(is_over_sharpened(batch_M, reference_M, correct_M).mean()),
        float(is_over_sharpened(ratio_M, reference_M, correct_M).mean()),
        float(np.abs(batch_M - exact_M).sum(-1).mean() / 2),
        float(np.abs(ratio_M - exact_M).sum(-1).mean() / 2),
    )
