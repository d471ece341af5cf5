"""CISPO: the importance weight is clipped, no token's gradient is dropped (MiniMax-M1, arXiv 2506.13585).

    loss = -sg[ clip(rho, 1 - low, 1 + high) ] A log pi          rho = pi / pi_old

sg passes no gradient. Differs from GRPO's clip: a token beyond the bounds keeps a gradient, with a bounded weight.
`low` = 1 is no lower bound, as in the paper (the ratio is never negative). Printed: the formula and the token mean; the
value of `high` was tuned and is not given: 0.2 is verl's example, slime suggests 4. `policy/clip_high` and
`policy/clip_low` count tokens whose weight was cut, whatever their advantage. Degenerate case: at pi = pi_old the
gradient is REINFORCE's, A grad log pi. The loss's value has no meaning of its own; its gradient has.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, OldLogp, Reduction, Stats, TokenMetrics
from megasharp.algos.group_statistics import bounded, clip_metrics, logp_along, ratio_metrics
from megasharp.common.records import TokenInputs


class CISPOParams(MethodParams):
    """Bounds of the weight: [1 - low, 1 + high]."""

    low: float = Field(
        default=1.0,
        ge=0.0,
        description="Distance below 1 at which the importance weight is bounded: 1 - low. 1: no lower bound, as in "
        "the paper.",
    )
    high: float = Field(
        default=0.2,
        ge=0.0,
        description="Distance above 1 at which the importance weight is bounded: 1 + high. The paper does not give "
        "it; verl uses 0.2, slime suggests 4.",
    )


class CISPO(Method[CISPOParams]):
    """REINFORCE with a clipped importance weight, in place of the clipped surrogate."""

    paper = "2506.13585"
    status = "as printed; the upper bound's value is not given"
    options = "clipped importance weights that keep every token's gradient."
    Params = CISPOParams
    reduction = Reduction.TOKEN_MEAN

    def needs(self) -> Needs:
        """Ask for the old log-probs inside the loss, where the importance weight is made of them."""
        return Needs(old_logp=OldLogp.IN_LOSS)

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return -sg[clip(rho, 1 - low, 1 + high)] A log pi, [T] (2506.13585).

        The metrics are the ratio's, and the shares of tokens whose weight was cut at either bound.
        """
        bounded_T = bounded(logr_T.detach())
        ratio_T = torch.exp(bounded_T)
        low, high = 1.0 - self.params.low, 1.0 + self.params.high
        loss_T = -ratio_T.clamp(low, high) * adv_T * logp_along(x, logr_T)
        return loss_T, {**ratio_metrics(x, bounded_T), **clip_metrics(x, ratio_T > high, ratio_T < low)}
