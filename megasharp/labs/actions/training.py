"""Algorithm 1 of 2510.04028, for many seeds at once, and the expected dynamics without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megasharp.labs.actions.theory import theorem_1
from megasharp.labs.softmax import Adam, Array, Ascent, Optimizer, policy_gradient, sample, softmax, uniforms

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
