"""The clipped surrogate of PPO, per token (arXiv 1707.06347; DAPO's separate bounds, 2503.14476).

    rho = pi / pi_old          loss = max(-A rho, -A clip(rho, 1 - low, 1 + high))

With `dual` set, tokens of negative advantage are bounded once more: min(loss, -A dual) (dual clip, 1912.09729).
The log-ratio is clamped to [-20, 20] before the exponential, so one stray token cannot overflow the step.
Degenerate case: on the first optimizer step after a rollout pi equals pi_old, rho is 1 and nothing is clipped.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, OldLogp, Stats, TokenMetric, TokenMetrics
from megasharp.algos.group_statistics import bounded, clip_metrics, ratio_metrics
from megasharp.common.records import TokenInputs


class ClipParams(MethodParams):
    """Bounds of the importance ratio: [1 - low, 1 + high], and optionally `dual` > 1."""

    low: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="Distance below 1 at which the ratio of a negative token is clipped: the bound is 1 - low.",
    )
    high: float = Field(
        default=0.2,
        ge=0.0,
        description="Distance above 1 at which the ratio of a positive token is clipped: the bound is 1 + high. DAPO "
        "uses 0.28 to leave room for unlikely tokens.",
    )
    dual: float | None = Field(
        default=None,
        gt=1.0,
        description="Largest ratio that counts for tokens of negative advantage (dual clip), above 1; DAPO's scripts "
        "use 10. null: no second bound.",
    )


class Clip(Method[ClipParams]):
    """The default surrogate."""

    paper = "1707.06347"
    options = "the clipped PPO loss that is used where no other surrogate is named."
    Params = ClipParams

    def needs(self) -> Needs:
        """Ask for the old log-probs inside the loss, the divisor of the ratio."""
        return Needs(old_logp=OldLogp.IN_LOSS)

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return max(-A rho, -A clip(rho)), [T] (1707.06347); for A < 0 at most -A dual, where set (1912.09729).

        The metrics are the ratio's, and the shares of tokens that each bound acted on.
        """
        logr_T = bounded(logr_T)
        ratio_T = torch.exp(logr_T)
        clipped_T = ratio_T.clamp(1.0 - self.params.low, 1.0 + self.params.high)
        loss_T = torch.maximum(-adv_T * ratio_T, -adv_T * clipped_T)
        if self.params.dual is not None:
            # PPO's maximum bounds no loss of a negative advantage whose ratio is large.
            loss_T = torch.where(adv_T < 0, torch.minimum(loss_T, -adv_T * self.params.dual), loss_T)
        too_high_T = (adv_T > 0) & (ratio_T > 1.0 + self.params.high)
        too_low_T = (adv_T < 0) & (ratio_T < 1.0 - self.params.low)
        metrics = {**ratio_metrics(x, logr_T), **clip_metrics(x, too_high_T, too_low_T)}
        if self.params.dual is not None:
            bounded_T = (adv_T < 0) & (ratio_T > self.params.dual)
            metrics["policy/clip_dual"] = TokenMetric(bounded_T.to(ratio_T.dtype), x.mask_T)
        return loss_T, metrics
