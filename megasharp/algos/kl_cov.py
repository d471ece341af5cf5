"""KL-Cov: the tokens of highest covariance are held to the old policy (The Entropy Mechanism of RL, arXiv 2505.22617).

    cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old)
    loss_t = -A_t rho_t + coefficient |log rho_t|     for the max(floor(share N), 1) tokens of the highest cov_t
    loss_t = -A_t rho_t                               for all others

Differs from GRPO: no clip at all. The paper prints a KL penalty to the old policy; |log rho| is the authors' code. The
share is 0.002 in their run of 7B, 0.0002 of 32B; the coefficient 1. Public code calls the share a per cent.

Departures from public code, so that the result does not depend on packing: there the means, N and the top are of one
micro-batch and the log-probs the current ones; here they are of the whole optimizer step, from log-probs before it.
Equal covariances at the boundary are chosen among by a draw, so the number is exact. Degenerate cases: on the first
optimizer step after a rollout rho is 1 and the penalty has no gradient, so with one mini-batch per rollout this is the
unclipped policy gradient; a step in which all advantages are equal still picks its share, by the draw. A factor that
another method puts on the surrogate (`forking_tokens`, `truncated_is`) is on the penalty too.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import (
    Coefficient,
    Method,
    MethodParams,
    Needs,
    OldLogp,
    Stats,
    TokenMetric,
    TokenMetrics,
    settled,
)
from megasharp.algos.bypass import Bypass
from megasharp.algos.casp import CaSP
from megasharp.algos.covariance import covariance, covariance_means, draw_threshold, share_of
from megasharp.algos.group_statistics import bounded, ratio_metrics
from megasharp.common.records import TokenInputs


class KLCovParams(MethodParams):
    """`share` of all tokens that is penalised, and the penalty's `coefficient`."""

    share: float = Field(
        default=0.002,
        gt=0.0,
        le=1.0,
        description="Share of the optimizer step's tokens that are penalised, those of the highest covariance. The "
        "authors use 0.002 for 7B and 0.0002 for 32B.",
    )
    coefficient: Coefficient = Field(
        default=1.0,
        description="Factor of the penalty on the distance from the old policy, a number or a ramp. The authors use 1.",
    )


class KLCov(Method[KLCovParams]):
    """The unclipped ratio, with a penalty on the tokens of highest covariance."""

    paper = "2505.22617"
    status = "from the authors' code; statistics of the whole optimizer step"
    options = "a penalty to the old policy on the tokens of highest covariance."
    Params = KLCovParams

    def needs(self) -> Needs:
        """Ask for the old log-probs before the step, of which the covariance is made, and for a draw per token."""
        return Needs(old_logp=OldLogp.BEFORE_STEP, draw=True)

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `casp` with a lambda_top1 other than 1, and `bypass`: both would change what is penalised."""
        if isinstance(other, CaSP) and other.params.lambda_top1 != 1.0:
            return f"lambda_top1 would change the penalty's ratio or weight too; set recipe.{name}.lambda_top1 to 1"
        return "the penalty is to the old policy, the ratio to the sampler" if isinstance(other, Bypass) else None

    def prepare(self, adv_T: Tensor, x: TokenInputs) -> Stats:
        """Return the step's means, the lowest covariance that is penalised, and the draw that settles ties at it.

        Float64 scalars `mean_advantage`, `mean_logp` (nats), `covariance` and `draw` (2505.22617).
        """
        means = covariance_means(adv_T, x)
        scored_T = x.mask_T > 0
        cov_T = covariance(adv_T, x, means).masked_fill(~scored_T, -torch.inf)
        count = min(share_of(x, self.params.share), int(scored_T.sum()))
        lowest = torch.topk(cov_T, count).values[-1] if count else cov_T.new_tensor(torch.inf)
        # Of the tokens that share the lowest covariance, a draw picks as many as are missing.
        tied = count - int((cov_T > lowest).sum())
        return {**means, "covariance": lowest, "draw": draw_threshold(x, scored_T & (cov_T == lowest), tied)}

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return -A rho, [T], plus coefficient |log rho| at tokens of the highest covariance (the code of 2505.22617).

        The metrics are the ratio's, and the share of tokens that is penalised.
        """
        assert x.draw_T is not None
        logr_T = bounded(logr_T)
        cov_T = covariance(adv_T, x, stats)
        tied_T = (cov_T == stats["covariance"]) & (x.draw_T <= stats["draw"])
        chosen_T = ((x.mask_T > 0) & ((cov_T > stats["covariance"]) | tied_T)).to(x.mask_T.dtype)
        loss_T = -adv_T * torch.exp(logr_T) + settled(self.params.coefficient) * chosen_T * logr_T.abs()
        return loss_T, {**ratio_metrics(x, logr_T), "method/kl_cov/penalised": TokenMetric(chosen_T, x.mask_T)}
