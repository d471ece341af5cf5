"""Policies over a few labels for the studies: softmax policies that are trained, and tilted ones in closed form.

Plain NumPy in float64 instead of recipes and a learner: a study is thousands of updates of a handful of numbers for
dozens of seeds, and one array operation over all seeds takes as long as one call of a hook. The tests compare the
advantages and the optimizers with megasharp's own methods and torch's optimizers.

Suffixes of the studies: `_R` seeds (runs), `_T` training steps and the start before them, `_G` samples of a group,
`_V` labels or actions, `_M` modes. Leading axes are independent cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations_with_replacement
from math import factorial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]


def softmax(logit_RV: Floats) -> Floats:
    """Probabilities along the last axis."""
    unnormalised_RV = np.exp(logit_RV - logit_RV.max(axis=-1, keepdims=True))
    return np.asarray(unnormalised_RV / unnormalised_RV.sum(axis=-1, keepdims=True))


def entropy(policy_RV: Floats) -> Floats:
    """Entropy along the last axis, in nats; 0 log 0 is 0."""
    tiny = np.finfo(np.float64).tiny
    return np.asarray(-(policy_RV * np.log(np.maximum(policy_RV, tiny))).sum(axis=-1))


def uniforms(seeds: Sequence[int], steps: int, group_size: int) -> Floats:
    """Draw a study's random numbers, [R, T, G] in [0, 1); a seed draws the same ones in every setting of one size."""
    return np.stack([np.random.default_rng(seed).random((steps, group_size)) for seed in seeds])


def sample(policy_RV: Floats, uniform_RG: Floats) -> Counts:
    """Sample actions [R, G], int64, by inversion of the cumulative distribution."""
    # The last column is left out: rounding may leave it just below 1.
    passed_RGV = uniform_RG[:, :, None] > np.cumsum(policy_RV, axis=-1)[:, None, :-1]
    return np.asarray(passed_RGV.sum(axis=-1), dtype=np.int64)


@cache
def _multisets(actions: int, group_size: int) -> tuple[Floats, Floats]:
    """Return the multisets of `group_size` actions as counts [K, V], and how many orders each has, [K]."""
    drawn = combinations_with_replacement(range(actions), group_size)
    count_KV = np.array([[group.count(action) for action in range(actions)] for group in drawn], dtype=np.float64)
    orders_K = [factorial(group_size) / np.prod([factorial(int(c)) for c in count_V]) for count_V in count_KV]
    return count_KV, np.array(orders_K)


def groups(policy_V: Floats, group_size: int) -> tuple[Floats, Floats]:
    """Enumerate the multisets of `group_size` sampled actions: counts [K, V], multinomial probabilities [K]."""
    count_KV, orders_K = _multisets(len(policy_V), group_size)
    return count_KV, np.asarray(orders_K * np.prod(policy_V**count_KV, axis=-1))


def policy_gradient(policy_RV: Floats, action_RG: Counts, weight_RG: Floats) -> Floats:
    """The gradient with respect to the logits of `1/G sum_i weight_i log pi(action_i)`, [R, V]."""
    one_hot_RGV = np.eye(policy_RV.shape[-1])[action_RG]
    return np.asarray((weight_RG[:, :, None] * (one_hot_RGV - policy_RV[:, None, :])).mean(axis=1))


class Optimizer(Protocol):
    """Turns a gradient of what is to be maximised into a change of the parameters."""

    def change(self, gradient: Floats, parameter: Floats) -> Floats:
        """Return the change to add to `parameter`; call it once per step."""
        ...

    def reset(self, row_R1: Bools) -> None:
        """Forget the past of the rows that are True."""
        ...


@dataclass(slots=True)
class Ascent:
    """Plain gradient steps; with `momentum`, along torch's buffer `b = momentum * b + gradient`.

    Arrays in place of numbers give every row its own, here and in `Adam`.
    """

    lr: float | Floats
    momentum: float | Floats = 0.0
    buffer: Floats = field(default_factory=lambda: np.zeros(()))

    def change(self, gradient: Floats, parameter: Floats) -> Floats:
        """Return the change to add to `parameter`."""
        self.buffer = self.momentum * self.buffer + gradient
        return np.asarray(self.lr * self.buffer)

    def reset(self, row_R1: Bools) -> None:
        """Forget the past of the rows that are True."""
        self.buffer = np.where(row_R1, 0.0, self.buffer)


@dataclass(slots=True)
class Adam:
    """Adam with torch's default betas and epsilon; `weight_decay` is AdamW's decoupled one."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float | Floats, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    steps: int | Counts = 0
    first: Floats = field(default_factory=lambda: np.zeros(()))
    second: Floats = field(default_factory=lambda: np.zeros(()))

    def change(self, gradient: Floats, parameter: Floats) -> Floats:
        """Return the change to add to `parameter`."""
        slow, slower = self.betas
        self.steps = self.steps + 1
        self.first = slow * self.first + (1.0 - slow) * gradient
        self.second = slower * self.second + (1.0 - slower) * gradient**2
        scale = np.sqrt(self.second / (1.0 - slower**self.steps)) + self.epsilon
        direction = self.first / (1.0 - slow**self.steps) / scale
        return np.asarray(self.lr * (direction - self.weight_decay * parameter))

    def reset(self, row_R1: Bools) -> None:
        """Forget the past of the rows that are True."""
        self.first, self.second = np.where(row_R1, 0.0, self.first), np.where(row_R1, 0.0, self.second)
        self.steps = np.where(row_R1, 0, self.steps)


def log_partition(reference_M: Floats, exponent_M: Floats) -> Floats:
    """log of the sum over modes of reference * exp(exponent), without overflow."""
    top = exponent_M.max(-1)
    total: Floats = np.log((reference_M * np.exp(exponent_M - top[..., None])).sum(-1)) + top
    return total


def tilt(reference_M: Floats, exponent_M: Floats) -> Floats:
    """The policy proportional to reference * exp(exponent)."""
    tilted: Floats = reference_M * np.exp(exponent_M - log_partition(reference_M, exponent_M)[..., None])
    return tilted


def kl(policy_M: Floats, reference_M: Floats) -> Floats:
    """KL(policy || reference) in nats; the reference must be positive everywhere."""
    positive_M = np.where(policy_M > 0, policy_M, 1.0)
    divergence: Floats = (policy_M * np.log(positive_M / reference_M)).sum(-1)
    return divergence
