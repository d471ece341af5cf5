"""Off-policy sequence masking: wrong responses that the policy has moved away from have no loss (arXiv 2512.02556).

    M = 0   where A < 0 and mean_u ( log pi_recorded(y_u) - log pi(y_u) ) > threshold,   else 1

Differs from GRPO: the surrogate is multiplied by M (DeepSeek-V3.2, section 3.1). A policy that has made such a response
unlikely already learns nothing from being pushed further, and the large ratios of its next mini-batches would unsettle
it. Good responses always stay. pi is the present policy, so M follows the mini-batches of a step; |y| counts unmasked
tokens.

`against: sampler` is the paper's: the inference framework's log-probs, of whichever version. `policy` leaves the shift
of dlc, top-p and top-k out of the distance, which would else count as off-policy. It masks and weighs nothing, so it
corrects nothing that is kept: the update leans towards what has a positive advantage. A weight (`truncated_is`) or
`bypass` may stand beside it.

Printed: the formula. Not printed: the threshold; TRL suggests 0.5, slime's default is 1e-4. The sign of A is read token
by token, which is the response's where all its tokens share one. Denominators stay those of the step, as in public
code. Degenerate case: on-policy the mean is 0 and everything is kept.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Stats, TokenMetric, TokenMetrics
from megasharp.algos.group_statistics import Compared, ComparedParams, at_level
from megasharp.common.records import TokenInputs


class OffPolicyMaskParams(ComparedParams):
    """`threshold`: the largest mean log-ratio of a response with negative advantage that still trains."""

    threshold: float = Field(
        default=0.5,
        gt=0.0,
        description="Largest mean, over a response, of the recorded log-prob less the present one (nats a token) at "
        "which a negative advantage still counts. TRL suggests 0.5, slime's default is 1e-4; the paper gives none.",
    )


class OffPolicyMask(Compared[OffPolicyMaskParams]):
    """A mask on responses of negative advantage that the policy has moved away from."""

    paper = "2512.02556"
    status = "as printed; the threshold is not given"
    options = "responses of negative advantage that the policy has moved away from have no loss."
    Params = OffPolicyMaskParams

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return M, [T] (2512.02556, section 3.1). The metrics are the share of tokens dropped, and the mean gap."""
        assert x.logp_T is not None
        gap_T = at_level(self.recorded(x) - x.logp_T.detach(), x, "geometric")
        dropped_T = ((adv_T < 0) & (gap_T > self.params.threshold)).to(x.mask_T.dtype)
        return 1.0 - dropped_T, {
            "method/off_policy_mask/dropped": TokenMetric(dropped_T, x.mask_T),
            "method/off_policy_mask/gap": TokenMetric(gap_T, x.mask_T),
        }
