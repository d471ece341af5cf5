"""A penalty that keeps the policy near a reference: the k3 estimate of KL(pi || pi_ref) per token.

    d = log pi_ref - log pi          k3 = exp(d) - d - 1        (Schulman, "Approximating KL divergence", 2020)

Added to the loss as `coefficient * k3`, with gradient through log pi. d is clamped to [-20, 20]. k3 is never
negative and is zero where the two policies agree. GRPO's own coefficient is 0.001 in public configurations.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, TokenMetric, TokenMetrics
from megasharp.types import TokenInputs

LOG_RATIO_BOUND = 20.0


class KLParams(MethodParams):
    """`coefficient` multiplies the estimate."""

    coefficient: float = Field(default=0.001, ge=0.0)


class KL(Method[KLParams]):
    """The k3 penalty to the reference policy."""

    paper = "2402.03300"
    Params = KLParams

    def needs(self) -> Needs:
        return Needs(ref_logp=True)

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        assert x.logp_T is not None and x.ref_logp_T is not None
        difference_T = (x.ref_logp_T - x.logp_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        k3_T = torch.exp(difference_T) - difference_T - 1.0
        return self.params.coefficient * k3_T, {"policy/kl_ref": TokenMetric(k3_T.detach(), x.mask_T)}
