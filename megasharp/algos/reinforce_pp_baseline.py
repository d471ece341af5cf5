"""REINFORCE++ with baseline: rewards less their group's mean, whitened over the whole step (arXiv 2501.03262).

    x_i = r_i - mean(r of the group)          A_t = (x_t - mu) / sqrt(var + epsilon)

mu and var are those of x over ALL scored response tokens of the training step, so long responses weigh more. It differs
from GRPO in the divisor, one for the step where GRPO has one per group. Printed: the two normalisations. From public
code: the token weights, epsilon = 1e-8 and the unbiased variance (`std: population` divides by the count instead).
Degenerate cases: a group whose rewards are all equal has x = 0, and hence the advantage -mu / deviation, which is not
zero when lengths differ. A single scored response has x = 0, where public trainers leave it its reward. A step whose x
are all zero has zero advantages.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, TokenMetric, TokenMetrics
from megasharp.algos.group_statistics import Divisor, centred
from megasharp.common.records import Group, TokenInputs


class ReinforcePPBaselineParams(MethodParams):
    """`std` picks the divisor of the variance; `epsilon` keeps a step of nearly equal advantages finite."""

    std: Divisor = Field(
        default="unbiased",
        description="Divisor of the step's variance: unbiased divides by the number of tokens minus 1, population by "
        "their number.",
    )
    epsilon: float = Field(
        default=1e-8,
        gt=0.0,
        description="Number added to the variance, so that steps of nearly equal advantages stay finite.",
    )


class ReinforcePPBaseline(Method[ReinforcePPBaselineParams]):
    """Group baseline, batch normalisation."""

    paper = "2501.03262"
    status = "as printed; token weights and epsilon from public code"
    options = "rewards minus the group mean, normalised over the whole step."
    Params = ReinforcePPBaselineParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return x_i = r_i - mean(r), float64 [G], before the step's whitening; zeros in a uniform group."""
        return centred(rewards_G)

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return (x_t - mu) / sqrt(var + epsilon) over all unmasked tokens, float64 [T], 0 where masked (2501.03262).

        The metrics are mu and the square root of var.
        """
        weight_T = x.mask_T.to(adv_T.dtype)
        tokens = weight_T.sum()
        mean = (adv_T * weight_T).sum() / tokens.clamp(min=1.0)
        centred_T = (adv_T - mean) * weight_T
        # Long responses weigh more: the step's mean and variance are over tokens.
        divisor = tokens - 1.0 if self.params.std == "unbiased" else tokens
        variance = centred_T.square().sum() / divisor.clamp(min=1.0)
        metrics = {
            "method/reinforce_pp_baseline/mean": TokenMetric(adv_T, x.mask_T),
            "method/reinforce_pp_baseline/deviation": TokenMetric(variance.sqrt().expand_as(adv_T), x.mask_T),
        }
        return centred_T * torch.rsqrt(variance + self.params.epsilon), metrics
