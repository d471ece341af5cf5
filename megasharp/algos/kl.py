"""A penalty that keeps the policy near a reference: an estimate of KL(pi || pi_ref) per token.

    d = log pi_ref - log pi
    k1 = -d          k2 = d^2 / 2          k3 = exp(d) - d - 1        (Schulman, "Approximating KL divergence", 2020)

Added to the loss as `coefficient * estimate`, with gradient through log pi. d is clamped to [-20, 20]. k3 is GRPO's
(arXiv 2402.03300); k2 has the gradient of the KL divergence itself; k1 as a loss has a gradient of mean zero and only
shifts the loss. All are zero where the two policies agree. Public GRPO configurations use 0.001.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Coefficient, Method, MethodParams, Needs, TokenMetric, TokenMetrics, settled
from megasharp.algos.group_statistics import bounded
from megasharp.common.records import TokenInputs


class KLParams(MethodParams):
    """`coefficient` multiplies the estimate `form`."""

    coefficient: Coefficient = Field(
        default=0.001,
        description="Factor of the divergence from the reference policy in the loss, a number or a ramp. Public GRPO "
        "settings use 0.001. 0: no penalty.",
    )
    form: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="Estimator of the divergence per token. k3 is GRPO's; k2 has the gradient of the divergence "
        "itself; k1 has a gradient of mean zero and only shifts the loss.",
    )


class KL(Method[KLParams]):
    """The penalty to the reference policy."""

    paper = "2402.03300"
    options = "a penalty on the divergence from the reference policy."
    Params = KLParams

    def needs(self) -> Needs:
        """Ask for the reference policy's log-probs."""
        return Needs(ref_logp=True)

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return coefficient times k1, k2 or k3, [T], with gradient; the metric is the estimate itself, in nats."""
        assert x.logp_T is not None and x.ref_logp_T is not None
        difference_T = bounded(x.ref_logp_T - x.logp_T)
        if self.params.form == "k1":
            estimate_T = -difference_T
        elif self.params.form == "k2":
            estimate_T = difference_T.square() / 2.0
        else:
            estimate_T = torch.exp(difference_T) - difference_T - 1.0
        metrics = {"policy/kl_ref": TokenMetric(estimate_T.detach(), x.mask_T)}
        return settled(self.params.coefficient) * estimate_T, metrics
