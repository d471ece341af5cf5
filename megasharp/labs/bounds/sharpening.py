"""Sharpening of a policy over modes: section 3.2 and appendices A to D of arXiv 2601.15609, as functions.

A query has M modes (classes of responses); an array `x_M` holds one number per mode in its last axis, and leading axes
are independent cases. Probabilities and advantages are float64 without a unit; `correct_M` is bool; `beta` > 0 is the
coefficient of KL(policy || reference); `count_M` says how often each mode was sampled, and its sum is the group size G.

The formulas' symbols are lost in the text we have. What the text says in words is marked [PAPER], what we rebuilt from
the proofs [DERIVED].
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from megasharp.labs.tilting import Bools, Counts, Floats, kl, log_partition, tilt

# A probability may lose this much, relatively, by rounding and still count as "not decreased".
ROUNDING = 1e-12


class Sharpening(StrEnum):
    """Definition 3.1 [PAPER]: no correct mode loses probability, or some correct mode does."""

    MODERATE = "moderate"
    OVER = "over"


def is_over_sharpened(policy_M: Floats, reference_M: Floats, correct_M: Bools) -> Bools:
    """Definition 3.1 [PAPER] for many cases at once: whether any correct mode is less likely than in the reference."""
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

    It is the maximiser of the linear surrogate sum_i (n_i A_i / G) policy_i - beta KL. It is not where GRPO's own
    surrogates come to rest: see `ratio_policy`. Take it as the paper's definition.
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
