"""Algorithm 1 of 2510.04028, for many seeds at once, and the expected dynamics without sampling.

Lemma 1 and Theorem 1 of 2510.04028, and the same expectations by exact enumeration of all groups.

Theorem 1 writes the advantage as a fixed number per action. Algorithm 1 takes A = r - mean of the sampled group, which
depends on the group. With A = r the two expectations differ by the factor 1 - 1/G: a sample is its own baseline's G-th
part. One half at G = 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import factorial
from typing import Literal

import numpy as np

from megasharp.studies.softmax import Adam, Array, Ascent, Optimizer, policy_gradient, sample, softmax, uniforms

# How a sampled action gets its advantage. "fixed": the action's own number, whatever else is in the group.
Rule = Literal["fixed", "mean", "leave one out", "mean and std", "mean, negative only"]
RULES: tuple[Rule, ...] = ("fixed", "mean", "leave one out", "mean and std", "mean, negative only")
STD_EPSILON = 1e-6


def theorem_1(policy_V: Array, advantage_V: Array) -> Array:
    """E[dz_v] / lr = pi(v) [(1 - pi(v)) A(v) - sum over u != v of pi(u) A(u)], for advantages fixed per action [V]."""
    mean = policy_V @ advantage_V
    others_V = mean - policy_V * advantage_V
    return np.asarray(policy_V * ((1.0 - policy_V) * advantage_V - others_V))


def groups(policy_V: Array, group_size: int) -> tuple[Array, Array]:
    """All multisets of `group_size` sampled actions: counts [K, V] and their multinomial probabilities [K]."""
    actions = range(len(policy_V))
    drawn = combinations_with_replacement(actions, group_size)
    count_KV = np.array([[group.count(action) for action in actions] for group in drawn], dtype=np.float64)
    orders_K = [factorial(group_size) / np.prod([factorial(int(c)) for c in count_V]) for count_V in count_KV]
    return count_KV, np.asarray(orders_K * np.prod(policy_V**count_KV, axis=-1))


def group_advantages(rule: Rule, reward_V: Array, count_KV: Array) -> Array:
    """The advantage [K, V] that each action has in each group; what an absent action has is never used."""
    size = count_KV.sum(axis=-1, keepdims=True)
    centred_KV = reward_V - (count_KV @ reward_V)[:, None] / size
    match rule:
        case "fixed":
            return np.asarray(np.broadcast_to(reward_V, count_KV.shape))
        case "mean":
            return np.asarray(centred_KV)
        case "leave one out":
            return np.asarray(centred_KV * size / (size - 1.0))
        case "mean and std":
            variance_K1 = (count_KV * centred_KV**2).sum(axis=-1, keepdims=True) / (size - 1.0)
            return np.asarray(centred_KV / (np.sqrt(variance_K1) + STD_EPSILON))
        case "mean, negative only":
            return np.asarray(np.minimum(centred_KV, 0.0))


def enumerated_update(rule: Rule, policy_V: Array, reward_V: Array, group_size: int) -> Array:
    """E[g / G] of Algorithm 1 [V]: the exact mean over all groups of `1/G sum_i A_i (one_hot(a_i) - pi)`."""
    count_KV, probability_K = groups(policy_V, group_size)
    weight_KV = count_KV * group_advantages(rule, reward_V, count_KV) / group_size
    gradient_KV = weight_KV - policy_V * weight_KV.sum(axis=-1, keepdims=True)
    return np.asarray(probability_K @ gradient_KV)


def probability_change(policy_V: Array, sampled: int) -> Array:
    """d pi / d(lr A) [V] of one Lemma 1 update: what a small positive advantage of `sampled` does to probabilities.

    Lemma 1 moves logits by one_hot - pi; to first order pi(u) moves by pi(u) (dz_u - sum pi dz).
    """
    logit_V = np.eye(len(policy_V))[sampled] - policy_V
    return np.asarray(policy_V * (logit_V - policy_V @ logit_V))


def theorem_ratio(rule: Rule, policy_V: Array, reward_V: Array, group_size: int) -> tuple[float, float]:
    """The factor c that fits `enumerated_update = c * theorem_1` best, and the largest misfit over the update."""
    exact_V, theorem_V = enumerated_update(rule, policy_V, reward_V, group_size), theorem_1(policy_V, reward_V)
    factor = float(exact_V @ theorem_V / (theorem_V @ theorem_V))
    return factor, float(np.abs(exact_V - factor * theorem_V).max() / np.abs(exact_V).max())


OptimizerName = Literal["Adam", "plain"]

# The paper's.
GROUP_SIZE, LR = 2, 0.1
# The paper gives no number of steps: enough for most seeds to go through both stages.
STEPS = {"Adam": 1000, "plain": 10_000}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. `rewards` and `start` (probabilities at temperature 1) are by action.

    `optimizer`: Algorithm 1 says "Apply Adam update" and writes the plain one. `negative_only`: the -N variant, where
    only samples of negative advantage count.
    """

    rewards: tuple[float, ...]
    start: tuple[float, ...]
    optimizer: OptimizerName = "Adam"
    group_size: int = GROUP_SIZE
    temperature: float = 1.0
    negative_only: bool = False
    lr: float = LR

    @property
    def steps(self) -> int:
        """Number of updates."""
        return STEPS[self.optimizer]


def simulate(setting: Setting, seeds: Sequence[int]) -> Array:
    """The sampling policy softmax(z / temperature) at every step, [R, T, V], the start included.

    The update is the paper's at every temperature, without the factor 1 / temperature of the gradient. Logits start at
    the log of `start`. Were they to start at temperature * log(start), the sampling policy would start there and move
    as one of temperature 1 does with lr / temperature.
    """
    uniform_RTG = uniforms(seeds, setting.steps, setting.group_size)
    reward_V = np.array(setting.rewards)
    logit_RV = np.tile(np.log(setting.start), (len(seeds), 1))
    optimizer: Optimizer = Adam(setting.lr) if setting.optimizer == "Adam" else Ascent(setting.lr)
    policy_RTV = np.empty((len(seeds), setting.steps + 1, len(reward_V)))
    for step in range(setting.steps):
        policy_RV = policy_RTV[:, step] = softmax(logit_RV / setting.temperature)
        action_RG = sample(policy_RV, uniform_RTG[:, step])
        reward_RG = reward_V[action_RG]
        advantage_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
        if setting.negative_only:
            advantage_RG = np.minimum(advantage_RG, 0.0)
        logit_RV = logit_RV + optimizer.change(policy_gradient(policy_RV, action_RG, advantage_RG), logit_RV)
    policy_RTV[:, -1] = softmax(logit_RV / setting.temperature)
    return policy_RTV


def expected_dynamics(setting: Setting) -> Array:
    """The plain update without sampling, [T, V]: every step adds lr (1 - 1/G) times Theorem 1, with A = r."""
    assert setting.optimizer == "plain" and not setting.negative_only
    factor = setting.lr * (1.0 - 1.0 / setting.group_size)
    logit_V = np.log(setting.start)
    policy_TV = np.empty((setting.steps + 1, len(setting.rewards)))
    for step in range(setting.steps + 1):
        policy_TV[step] = softmax(logit_V / setting.temperature)
        logit_V = logit_V + factor * theorem_1(policy_TV[step], np.array(setting.rewards))
    return policy_TV


def untempered(policy_RTV: Array, temperature: float) -> Array:
    """softmax(z) from softmax(z / temperature)."""
    tiny = np.finfo(np.float64).tiny
    return softmax(temperature * np.log(np.maximum(policy_RTV, tiny)))
