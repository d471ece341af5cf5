"""Train the cats classifier on the Persian input, all seeds at once: one setting in, its trajectories out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megasharp.labs.cats.world import (
    LABELS,
    PERSIAN_INPUT,
    Estimator,
    IACForm,
    advantages,
    calibrated,
    rewards,
    siamese_input,
)
from megasharp.labs.softmax import Adam, Array, Ascent, Optimizer, policy_gradient, sample, softmax, uniforms

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

    policy_RTV: Array
    weight_RDV: Array

    def held_out(self, shift: float) -> Array:
        """Label probabilities [R, V] of the Siamese input after training."""
        return softmax(siamese_input(shift) @ self.weight_RDV)


def train(setting: Setting, seeds: Sequence[int]) -> Trajectory:
    """Policy-gradient ascent from uniform probabilities (weights 0), on policy, one group of the Persian input a step.

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
        weight_RG = _advantages(setting, rewards(label_RG))
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


def _advantages(setting: Setting, reward_RG: Array) -> Array:
    advantage_RG = advantages(setting.estimator, reward_RG)
    if setting.alpha is None:
        return advantage_RG
    return calibrated(advantage_RG, reward_RG, setting.alpha, setting.iac_form)


def _outer(gradient_RV: Array) -> Array:
    """The gradient of the weights: the logits are linear in the features."""
    return np.asarray(PERSIAN_INPUT[:, None] * gradient_RV[:, None, :])
