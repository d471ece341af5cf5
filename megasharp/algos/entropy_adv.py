"""Entropy-Adv: advantages raised where the policy is uncertain (arXiv 2506.14758).

    psi_t = min( a sg[H_t], |A_t| / kappa )          A_t' = A_t + psi_t

sg passes no gradient to the entropy H_t. As kappa is above 1, A_t' has the sign of A_t. The paper: a = 0.4 with GRPO
(0.1 with PPO), kappa = 2, rewards +1 and -1, clip-higher and a loss per token. All of it is from third-party notes; no
official code was found.

Derived (ours): H_t is the entropy before the update, at the rollout's temperature. It is the current one in the first
optimizer step, and does not move with later ones, as the advantage it joins. Degenerate cases: tokens without advantage
stay without; where the policy is certain nothing changes. a = 0 is the estimator alone.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, TokenMetric, TokenMetrics
from megasharp.common.records import TokenInputs


class EntropyAdvParams(MethodParams):
    """`a` weighs the entropy; 1 / `kappa` is the largest share of the advantage that may be added."""

    a: float = Field(
        default=0.4,
        ge=0.0,
        description="Factor of the token's entropy (nats) in the bonus on its advantage. The paper uses 0.4 with "
        "GRPO. 0: no bonus.",
    )
    kappa: float = Field(
        default=2.0,
        gt=1.0,
        description="Bound on the bonus: at most 1 / kappa of the advantage's size is added. The paper uses 2; above "
        "1, so the sign stays.",
    )


class EntropyAdv(Method[EntropyAdvParams]):
    """A bonus on the advantage of uncertain tokens."""

    paper = "2506.14758"
    status = "from third-party notes; entropy before the update is derived"
    options = "a bonus on the advantage of tokens where the policy is uncertain."
    Params = EntropyAdvParams

    def needs(self) -> Needs:
        """Ask for the entropy before the update."""
        return Needs(old_entropy=True)

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Add min(a H_t, |A_t| / kappa) to A_t, float64 [T], H_t in nats before the update (2506.14758).

        The metrics are the mean bonus, and the share of tokens at which kappa bounds it.
        """
        assert x.old_entropy_T is not None
        bound_T = adv_T.abs() / self.params.kappa
        wanted_T = self.params.a * x.old_entropy_T.to(adv_T.dtype)
        bonus_T = torch.minimum(wanted_T, bound_T)
        metrics = {
            "method/entropy_adv/bonus": TokenMetric(bonus_T, x.mask_T),
            "method/entropy_adv/bounded": TokenMetric((wanted_T > bound_T).to(adv_T.dtype), x.mask_T),
        }
        return adv_T + bonus_T, metrics
