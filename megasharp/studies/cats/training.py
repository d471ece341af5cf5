"""The classifier of 2601.15609 section 3.4 and its training on the Persian input, all seeds at once.

There are four labels, inputs with fixed features, a reward, and group advantages. The paper's feature vectors are lost
in its text. It says: Persian and Siamese align with the Cat superclass and differ in subclass dimensions; dimension 1
is Persian's, dimension 3 Siamese's; similarity moves mass from 1 to 3. Ours are the simplest that fit (the coordinates
are superclass cat, Persian, Dog, Siamese). Labels have no features here: a linear classifier has a row of weights for
each. That the paper's labels enter through their features cannot be excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megasharp.studies.softmax import (
    Adam,
    Ascent,
    Counts,
    Floats,
    Optimizer,
    policy_gradient,
    sample,
    softmax,
    uniforms,
)

LABELS = ("Cat", "Dog", "Persian", "Siamese")
CAT, PERSIAN, SIAMESE = 0, 2, 3
CORRECT = (CAT, PERSIAN)

PERSIAN_INPUT = np.array([1.0, 1.0, 0.0, 0.0])
# Ours: how much of Persian's own coordinate the Siamese input has moved to its own.
SHIFTS = {"High": 0.2, "Mid": 0.5, "Low": 0.8}

# verl's constants: GRPO's guard on the standard deviation, and that of its batch whitening.
STD_EPSILON, VARIANCE_EPSILON = 1e-6, 1e-8

Estimator = Literal["raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline"]
ESTIMATORS: tuple[Estimator, ...] = ("raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline")
DISTINCT_ESTIMATORS = ESTIMATORS[:-1]
IACForm = Literal["normalized", "literal"]


def siamese_input(shift: float) -> Floats:
    """Return the features of the held-out Siamese input; `shift` 0 makes it Persian's, 1 as different as possible."""
    return np.array([1.0, 1.0 - shift, 0.0, shift])


def rewards(label_RG: Counts) -> Floats:
    """Return 1 for a correct label of a Persian input, the superclass or the subclass; else 0."""
    return np.isin(label_RG, CORRECT).astype(np.float64)


def advantages(estimator: Estimator, reward_RG: Floats) -> Floats:
    """Return group advantages along the last axis.

    raw: r. mean-shifted: r - mean. normalised: (r - mean) / (std + 1e-6), unbiased std (GRPO). RLOO: each reward less
    the mean of the others. RF++-baseline: r - mean, whitened over the batch; a step here is one group, so that it is
    the normalised estimator up to its epsilon. A group of equal rewards has zero advantages in all but raw.
    """
    centred_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
    group_size = reward_RG.shape[-1]
    match estimator:
        case "raw":
            return reward_RG
        case "mean-shifted":
            return np.asarray(centred_RG)
        case "normalised":
            return np.asarray(centred_RG / (reward_RG.std(axis=-1, ddof=1, keepdims=True) + STD_EPSILON))
        case "RLOO":
            return np.asarray(centred_RG * group_size / (group_size - 1))
        case "RF++-baseline":
            return np.asarray(centred_RG / np.sqrt(reward_RG.var(axis=-1, ddof=1, keepdims=True) + VARIANCE_EPSILON))


def calibrated(advantage_RG: Floats, reward_RG: Floats, alpha: float, form: IACForm) -> Floats:
    """Apply IAC: advantages of correct samples times (1 - share of correct)^alpha, or literally (number wrong)^alpha.

    The paper's formula is lost; which of the two forms it has is derived from its words (normalized) or from a third
    party's notes (literal). alpha = 0 changes nothing.
    """
    wrong_R1 = (1.0 - reward_RG).sum(axis=-1, keepdims=True)
    scale = reward_RG.shape[-1] if form == "normalized" else 1.0
    return np.where(reward_RG > 0, advantage_RG * (wrong_R1 / scale) ** alpha, advantage_RG)


OptimizerName = Literal["SGD", "momentum", "AdamW"]

STEPS = 500
# The paper gives none of these. 0.5 collapses raw rewards well within 500 steps at every group size of ours.
LR = 0.5
ADAMW_LR = 0.1
MOMENTUM = 0.9
WEIGHT_DECAY = 0.01
MEMORY_LR = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """One training. `alpha` None: no IAC. `mu` 0: no DLC. `importance_cap`: weights pi / sampler, truncated there."""

    estimator: Estimator = "raw"
    group_size: int = 8
    optimizer: OptimizerName = "SGD"
    lr: float = LR
    steps: int = STEPS
    alpha: float | None = None
    iac_form: IACForm = "normalized"
    mu: float = 0.0
    memory_lr: float = MEMORY_LR
    importance_cap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """`policy_RTV`: the label probabilities of the Persian input, start included; `weight_RDV`: the trained weights."""

    policy_RTV: Floats
    weight_RDV: Floats

    def held_out(self, shift: float) -> Floats:
        """Return the label probabilities [R, V] of the Siamese input after training."""
        return softmax(siamese_input(shift) @ self.weight_RDV)


def train(setting: Setting, seeds: Sequence[int]) -> Trajectory:
    """Train by on-policy gradient ascent from weights 0, with one group of the Persian input per step.

    DLC samples from softmax(z - mu * z_memory); the memory is the same classifier, one cross-entropy step per step.
    """
    uniform_RTG = uniforms(seeds, setting.steps, setting.group_size)
    weight_RDV = np.zeros((len(seeds), len(PERSIAN_INPUT), len(LABELS)))
    memory_RDV = np.zeros_like(weight_RDV)
    optimizer, memory_optimizer = _optimizer(setting), Ascent(setting.memory_lr)
    policy_RTV = np.empty((len(seeds), setting.steps + 1, len(LABELS)))
    for step in range(setting.steps):
        policy_RV = policy_RTV[:, step] = softmax(PERSIAN_INPUT @ weight_RDV)
        memory_logit_RV = PERSIAN_INPUT @ memory_RDV
        sampler_RV = softmax(PERSIAN_INPUT @ weight_RDV - setting.mu * memory_logit_RV)
        label_RG = sample(sampler_RV, uniform_RTG[:, step])
        reward_RG = rewards(label_RG)
        weight_RG = advantages(setting.estimator, reward_RG)
        if setting.alpha is not None:
            weight_RG = calibrated(weight_RG, reward_RG, setting.alpha, setting.iac_form)
        if setting.importance_cap is not None:
            ratio_RG = np.take_along_axis(policy_RV / sampler_RV, label_RG, axis=-1)
            weight_RG = weight_RG * np.minimum(ratio_RG, setting.importance_cap)
        gradient_RDV = _outer(policy_gradient(policy_RV, label_RG, weight_RG))
        weight_RDV = weight_RDV + optimizer.change(gradient_RDV, weight_RDV)
        if setting.mu:
            likelihood_RV = policy_gradient(softmax(memory_logit_RV), label_RG, np.ones_like(weight_RG))
            memory_RDV = memory_RDV + memory_optimizer.change(_outer(likelihood_RV), memory_RDV)
    policy_RTV[:, -1] = softmax(PERSIAN_INPUT @ weight_RDV)
    return Trajectory(policy_RTV, weight_RDV)


def _optimizer(setting: Setting) -> Optimizer:
    match setting.optimizer:
        case "SGD":
            return Ascent(setting.lr)
        case "momentum":
            return Ascent(setting.lr, MOMENTUM)
        case "AdamW":
            return Adam(setting.lr, WEIGHT_DECAY)


def _outer(gradient_RV: Floats) -> Floats:
    """Return the gradient of the weights: the logits are linear in the features."""
    return np.asarray(PERSIAN_INPUT[:, None] * gradient_RV[:, None, :])
