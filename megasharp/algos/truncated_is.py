"""A weight pi_old / pi_recorded for samples of another distribution, cut to bounds (truncated importance sampling).

    token      w_t = pi_old(y_t) / pi_recorded(y_t)
    sequence   w_t = prod_u pi_old(y_u) / pi_recorded(y_u), over the response's tokens
    geometric  w_t = ( prod_u ... ) ^ (1 / |y|)
    truncate   w cut to [low, high]          mask   w inside [low, high], else 0 (IcePop, arXiv 2510.18855)

Differs from GRPO: the surrogate's loss is multiplied by w, a constant; the ratio pi / pi_old and its clip stay. pi_old
is the policy before the update. `against` says what pi_recorded is:

    policy     the policy itself, as the engine computed it in the version that sampled the token. w corrects stale
               tokens and the engine's numerics. What the sampler does on purpose (dlc, top-p, top-k) stays: the update
               is that of the present policy sampled with the same shift, up to how the shift itself moved.
    sampler    the distribution that the token was drawn from. w undoes the shift as well: the update is the on-policy
               one in expectation, and DLC has no effect on it beyond its noise (research notes on 2601.15609). Tokens
               that top-p or top-k cut off are never seen, so no weight brings them back.

The log of w is bounded at 20. Upper truncation biases towards what was sampled and bounds the variance; `sequence` is
the unbiased weight of a response before it is cut, and grows with its length; `token` leaves the state distribution of
earlier tokens as it was sampled. `megasharp toy corrections` measures each.

From public code (verl's rollout correction; slime's truncated weights, bounds 0 and 2, and its IcePop), not from one
paper. |y| counts unmasked tokens. Degenerate case: equal distributions give w = 1. Metrics are over tokens, after the
cut: mean weight, its mean square (effective sample size as a share of the tokens: weight^2 / weight_squared), and the
share outside the bounds.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp, TokenMetric, TokenMetrics
from megasharp.algos.group_statistics import Compared, ComparedParams, Level, at_level, bounded
from megasharp.common.records import TokenInputs


class TruncatedISParams(ComparedParams):
    """`level` is the unit of the weight, `mode` the treatment of weights outside [`low`, `high`]."""

    level: Level = Field(
        default="token",
        description="Unit of the weight of the old policy against what was recorded: token, each token's ratio; "
        "sequence, their product over the response; geometric, its mean per token. gspo refuses token.",
    )
    mode: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="Treatment of weights outside low and high: truncate cuts them to the bound, mask sets them to 0 "
        "(IcePop).",
    )
    low: float = Field(default=0.0, ge=0.0, description="Lower bound of the weight. 0: none.")
    high: float = Field(
        default=2.0,
        gt=0.0,
        description="Upper bound of the weight; slime uses 2. Lower it for less variance and more bias.",
    )

    @model_validator(mode="after")
    def _some_between(self) -> TruncatedISParams:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not be above high ({self.high})")
        return self


class TruncatedIS(Compared[TruncatedISParams]):
    """The bounded importance weight of the old policy against what was recorded of policy or sampler."""

    paper = "2510.18855"
    status = "from public code: verl, slime"
    options = "an importance weight for samples that came from another distribution than the policy's."
    Params = TruncatedISParams
    corrects = True

    def needs(self) -> Needs:
        """Ask for the old log-probs inside the loss and the recorded ones, whose ratio is the weight."""
        return super().needs() | Needs(old_logp=OldLogp.IN_LOSS)

    def correction(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return w_t = pi_old / pi_recorded by token, response or geometric mean, cut to [low, high] or masked; [T].

        The metrics are w, its square, and the share outside the bounds (2510.18855 for the mask).
        """
        logw_T = at_level(x.before_T - self.recorded(x), x, self.params.level)
        weight_T = torch.exp(bounded(logw_T))
        outside_T = (weight_T < self.params.low) | (weight_T > self.params.high)
        if self.params.mode == "mask":
            weight_T = weight_T.masked_fill(outside_T, 0.0)
        else:
            weight_T = weight_T.clamp(self.params.low, self.params.high)
        return weight_T, {
            "method/truncated_is/weight": TokenMetric(weight_T, x.mask_T),
            "method/truncated_is/weight_squared": TokenMetric(weight_T.square(), x.mask_T),
            "method/truncated_is/outside": TokenMetric(outside_T.to(weight_T.dtype), x.mask_T),
        }
