"""A bonus for the policy's entropy, on every token (as in A3C, arXiv 1602.01783).

    loss_t += -coefficient H_t          H_t = entropy of pi(. | y_<t) in nats, at the rollout temperature

The sign: a coefficient above zero raises the entropy. The gradient goes through the whole distribution, not only the
sampled token. Reduced as the policy's loss is, per token. Printed for RLVR: 1e-4 in 2510.04028, 0.01 as the baseline of
2510.14807; the values that 2511.19942 swept are lost, 0.001 is a proposal. It raises diversity at a cost in correctness
(2511.19942, section 4.8.2). Degenerate case: a certain token has neither entropy nor gradient.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Coefficient, Method, MethodParams, Needs, TokenMetric, TokenMetrics, settled
from megasharp.common.records import TokenInputs


class EntropyBonusParams(MethodParams):
    """`coefficient` multiplies the entropy."""

    coefficient: Coefficient = Field(
        default=0.001,
        description="Factor of the policy's entropy (nats) that is subtracted from the loss, a number or a ramp. "
        "Papers use 0.0001 to 0.01. 0: no bonus.",
    )


class EntropyBonus(Method[EntropyBonusParams]):
    """Rewards entropy."""

    paper = "1602.01783"
    status = "as printed; the coefficient is a proposal"
    options = "a term that raises the policy's entropy."
    Params = EntropyBonusParams

    def needs(self) -> Needs:
        """Ask for the entropy with its gradient through the whole distribution."""
        return Needs(entropy=True, entropy_gradient=True)

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return -coefficient H_t, [T], H_t in nats (1602.01783)."""
        assert x.entropy_T is not None
        loss_T = -settled(self.params.coefficient) * x.entropy_T
        return loss_T, {"method/entropy_bonus/loss": TokenMetric(loss_T.detach(), x.mask_T)}
