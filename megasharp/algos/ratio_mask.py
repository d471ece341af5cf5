"""A mask on what the present policy finds too likely or too unlikely (rejection of samples, from public code).

    r_t = pi_old(y_t) / pi_recorded(y_t)          k3_t = r_t - 1 - log r_t
    token      kept where low <= r_t <= high and k3_t <= k3
    sequence   kept where low <= prod_u r_u <= high and sum_u k3_u <= k3
    geometric  kept where low <= (prod_u r_u)^(1/|y|) <= high and mean_u k3_u <= k3

Differs from GRPO: the loss of what is not kept is 0; what is kept has no weight. So it bounds how far samples may be
from the policy and corrects nothing: the update of what is kept is biased towards what was sampled. `truncated_is`
beside it weighs what is kept; `truncated_is: {mode: mask}` is IcePop, weight and mask of one ratio.

The product grows with the length of a response, so `sequence` drops long responses first; the geometric mean does not.
k3 is never negative, so differences of both signs do not cancel in it as they do in a product; its mean over samples of
pi_recorded is KL(pi_recorded || pi_old).

From public code: verl's rollout_rs (token_k1, seq_sum_k1, seq_mean_k1, token_k3, seq_sum_k3, seq_mean_k3), prime-rl's
token and geometric masks (0.125 to 8, 0.1 to 10), SkyRL's geometric mask (0.99 to 1.01). Ours: the bounds' defaults.
verl takes what it masks out of the denominators too; here those stay those of the step, so a mask makes the step
smaller and no kept token heavier. Degenerate case: equal distributions keep everything, unless the bounds exclude 1.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp, TokenMetric, TokenMetrics
from megasharp.algos.group_statistics import Compared, ComparedParams, Level, at_level, bounded
from megasharp.common.records import TokenInputs


class RatioMaskParams(ComparedParams):
    """`level` is the unit that is kept or dropped, `low` and `high` bound its ratio, `k3` its divergence."""

    level: Level = Field(
        default="geometric",
        description="Unit that is kept or dropped: token, each token by its ratio; sequence, a response by the product "
        "of its ratios; geometric, a response by their geometric mean, whatever its length. gspo refuses token.",
    )
    low: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Smallest ratio that is kept, at most 1. 0: none. SkyRL uses 0.99 at level geometric, verl's "
        "examples 0.999.",
    )
    high: float = Field(
        default=2.0,
        ge=1.0,
        description="Largest ratio that is kept, at least 1. Bring both bounds closer to 1 where training collapses "
        "with stale rollouts; the metric method/ratio_mask/dropped says what that costs.",
    )
    k3: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest divergence r - 1 - log r that is kept: of a token, of a response's sum (sequence) or "
        "mean (geometric). null: no bound.",
    )

    @model_validator(mode="after")
    def _some_between(self) -> RatioMaskParams:
        if self.low == 1.0 == self.high:
            raise ValueError("low and high are both 1: nothing but equal log-probs would be kept")
        return self


class RatioMask(Compared[RatioMaskParams]):
    """A mask on tokens or responses whose ratio to what was recorded is outside its bounds."""

    paper = "2510.18855"
    status = "from public code: verl, prime-rl, SkyRL"
    options = "tokens or responses whose ratio to what was recorded is outside its bounds have no loss."
    Params = RatioMaskParams

    def needs(self) -> Needs:
        """Ask for the old log-probs inside the loss and the recorded ones, whose ratio is judged."""
        return super().needs() | Needs(old_logp=OldLogp.IN_LOSS)

    def correction(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return 1 where token or response is kept, else 0; [T]. The metric is the share of tokens dropped."""
        logr_T = x.before_T - self.recorded(x)
        ratio_T = torch.exp(bounded(at_level(logr_T, x, self.params.level)))
        kept_T = (ratio_T >= self.params.low) & (ratio_T <= self.params.high)
        if self.params.k3 is not None:
            safe_T = bounded(logr_T)
            kept_T &= at_level(torch.expm1(safe_T) - safe_T, x, self.params.level) <= self.params.k3
        weight_T = kept_T.to(x.mask_T.dtype)
        return weight_T, {"method/ratio_mask/dropped": TokenMetric(1.0 - weight_T, x.mask_T)}
