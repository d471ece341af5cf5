"""Optimal policies of arXiv 2511.19942 over finitely many trajectories, and the paper's measures of them.

An array `x_N` holds one number per trajectory in its last axis; leading axes are independent cases; float64.
`base_N` > 0 is the base policy, `correct_N` says which trajectories solve the problem, `beta` > 0 weighs
KL(policy || base), `gamma` >= 0 the paper's log-prob terms. The formulas' symbols are lost in the text we have:
[PAPER] marks statements that it makes in words, [DERIVED] formulas that we rebuilt from its proofs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megasharp.studies.softmax import (
    Bools,
    Counts,
    Floats,
    kl,
    tilt,
)


def vanilla_policy(base_N: Floats, reward_N: Floats, beta: Floats) -> Floats:
    """Lemma B.1 [DERIVED]: the maximiser of E[r] - beta KL, base * exp(r / beta) / Z."""
    return tilt(base_N, reward_N / beta[..., None])


def entropy_policy(base_N: Floats, reward_N: Floats, beta: Floats, gamma: Floats) -> Floats:
    """Lemma B.4 [DERIVED]: for the reward r - gamma log base, base^(1 - gamma / beta) exp(r / beta) / Z."""
    return vanilla_policy(base_N, entropy_reward(base_N, reward_N, gamma), beta)


def entropy_reward(base_N: Floats, reward_N: Floats, gamma: Floats) -> Floats:
    """r - gamma log base: the bonus on all trajectories (section 3.3)."""
    reward: Floats = reward_N - gamma[..., None] * np.log(base_N)
    return reward


def smoothed_reward(base_N: Floats, correct_N: Bools, positive: Floats, negative: Floats) -> Floats:
    """Equation 4, and with `negative` = 0 equation 3 [DERIVED].

    1 - positive log base for a correct trajectory, negative log base for another.
    """
    log_base_N = np.log(base_N)
    return np.where(correct_N, 1 - positive[..., None] * log_base_N, negative[..., None] * log_base_N)


def smoothed_policy(base_N: Floats, correct_N: Bools, beta: Floats, positive: Floats, negative: Floats) -> Floats:
    """Lemma B.5 (`negative` = 0) [DERIVED]: correct ~ base^(1 - positive / beta) e^(1 / beta), incorrect ~ base.

    With `negative` (equation 4), incorrect ~ base^(1 + negative / beta).
    """
    return vanilla_policy(base_N, smoothed_reward(base_N, correct_N, positive, negative), beta)


def correctness(policy_N: Floats, correct_N: Bools) -> Floats:
    """Definition 3.3 [PAPER]: the probability of a correct trajectory."""
    total: Floats = (policy_N * correct_N).sum(-1)
    return total


def normalised_variance(policy_N: Floats, correct_N: Bools) -> Floats:
    """Definition 3.3: variance of the correct trajectories' probabilities, over their squared mean (no unit).

    The paper's normalisation is lost [DERIVED]. Any of mean squared, total squared, or the variance of the
    probabilities given that the response is correct orders policies over the same trajectories in the same way.
    """
    number = correct_N.sum(-1)
    share_N = policy_N * correct_N / correctness(policy_N, correct_N)[..., None]
    variance: Floats = number * np.square(share_N).sum(-1) - 1
    return variance


def chi_square(policy_M: Floats, reference_M: Floats) -> Floats:
    """Pearson's chi-square divergence: sum of policy^2 / reference, minus 1."""
    divergence: Floats = (np.square(policy_M) / reference_M).sum(-1) - 1
    return divergence


# (policy, base) -> divergence: those of Theorem B.10.
DIVERGENCES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "reverse KL": kl,
    "forward KL": lambda policy_N, base_N: kl(base_N, policy_N),
    "reverse chi2": chi_square,
    "forward chi2": lambda policy_N, base_N: chi_square(base_N, policy_N),
}


def improvement_probability(base_N: Floats, samples: int) -> Floats:
    """Proposition B.2 [DERIVED]: the probability that a correct trajectory gains, 1 - (1 - base)^n.

    That is the probability that n samples contain it. Where every trajectory is correct and all are sampled nothing
    gains, which the proposition leaves out.
    """
    probability: Floats = 1 - (1 - base_N) ** samples
    return probability


def estimated_reward(correct_N: Bools, count_N: Counts) -> Floats:
    """Section 3.1 [PAPER]: 1 for a correct trajectory that was sampled, 0 for all others."""
    return (correct_N & (count_N > 0)).astype(np.float64)


def matching_rate(base_N: Floats, correct_N: Bools, beta: Floats, gamma: Floats) -> Floats:
    """1 / beta' of Theorem B.10's proof [DERIVED]: equal correctness at gamma' / beta' = gamma / beta.

    1 / beta' = 1 / beta - log( sum_I base^(1 - gamma / beta) / sum_I base ), I = incorrect trajectories. Where this is
    not positive, the proof's choice does not exist.
    """
    power_N = np.where(correct_N, 0.0, base_N ** (1 - (gamma / beta)[..., None]))
    rate: Floats = 1 / beta - np.log(power_N.sum(-1) / (base_N * ~correct_N).sum(-1))
    return rate


def compose(base_N: Floats, correct_N: Bools, right: Floats, exponent: Floats, other: Floats) -> Floats:
    """The policy of correctness `right` with base^exponent among the correct and base^other among the incorrect."""
    power_N = np.where(correct_N, base_N ** exponent[..., None], base_N ** other[..., None])
    mass = correctness(power_N, correct_N)
    scale_N = np.where(correct_N, (right / mass)[..., None], ((1 - right) / (power_N.sum(-1) - mass))[..., None])
    policy: Floats = power_N * scale_N
    return policy


def on_policy_optimum(base_N: Floats, correct_N: Bools, beta: Floats, positive: Floats, negative: Floats) -> Floats:
    """The maximiser when log policy replaces log base in equation 4 (appendix B.3); needs `negative` < beta [ours].

    Stationarity gives log policy = (1 - positive - beta - l + beta log base) / (beta + positive) where correct and
    (negative - beta - l + beta log base) / (beta - negative) elsewhere; l is found by bisection on the total.
    """
    beta, positive, negative = beta[..., None], positive[..., None], negative[..., None]
    scale_N = np.where(correct_N, beta + positive, beta - negative)
    level_N = np.where(correct_N, 1 - positive, negative) - beta + beta * np.log(base_N)
    # At `low` one probability is 1, at `high` none exceeds 1 / N.
    low = level_N.max(-1, keepdims=True)
    high = (level_N + scale_N * np.log(base_N.shape[-1])).max(-1, keepdims=True)
    for _ in range(120):
        middle = (low + high) / 2
        too_much = np.exp((level_N - middle) / scale_N).sum(-1, keepdims=True) > 1
        low, high = np.where(too_much, middle, low), np.where(too_much, high, middle)
    policy_N = np.exp((level_N - high) / scale_N)
    normalised: Floats = policy_N / policy_N.sum(-1, keepdims=True)
    return normalised


def on_policy_objective(
    policy_N: Floats, base_N: Floats, correct_N: Bools, beta: Floats, positive: Floats, negative: Floats
) -> Floats:
    """E[equation 4's reward with log policy in place of log base] - beta KL(policy || base)."""
    reward_N = smoothed_reward(policy_N, correct_N, positive, negative)
    value: Floats = (policy_N * reward_N).sum(-1) - beta * kl(policy_N, base_N)
    return value


def on_policy_rate(policy_N: Floats, base_N: Floats, correct_N: Bools, exponent: Floats, other: Floats) -> Floats:
    """1 / beta' for which equation 4 with log base has `policy_N` as its optimum, given both exponents [ours].

    It is the mass ratio's: log( C / (1 - C) * sum_I base^other / sum_C base^exponent ).
    """
    right, wrong = correctness(policy_N, correct_N), correctness(policy_N, ~correct_N)
    inside = np.where(correct_N, base_N ** exponent[..., None], 0.0).sum(-1)
    outside = np.where(correct_N, 0.0, base_N ** other[..., None]).sum(-1)
    rate: Floats = np.log(right / wrong * outside / inside)
    return rate
