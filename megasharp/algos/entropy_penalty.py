"""A penalty on the policy's entropy, on every token (entropy minimisation, arXiv 2505.15134; compared in 2511.19942).

    loss_t += coefficient H_t          H_t = entropy of pi(. | y_<t) in nats, at the rollout temperature

The opposite of entropy_bonus, sign by sign: a coefficient above zero lowers the entropy. 2511.19942 finds that it helps
where problems have few solutions and costs diversity; the values swept there are lost, 0.001 is a proposal. Reduced as
the policy's loss is, per token. Degenerate case: a certain token has neither entropy nor gradient.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Coefficient, Method, MethodParams, Needs, TokenMetric, TokenMetrics, settled
from megasharp.common.records import TokenInputs


class EntropyPenaltyParams(MethodParams):
    """`coefficient` multiplies the entropy."""

    coefficient: Coefficient = Field(
        default=0.001,
        description="Factor of the policy's entropy (nats) that is added to the loss, a number or a ramp. The paper's "
        "value is unknown; 0.001 is a proposal. 0: no penalty.",
    )


class EntropyPenalty(Method[EntropyPenaltyParams]):
    """Punishes entropy."""

    paper = "2505.15134"
    status = "as printed; the coefficient is a proposal"
    options = "a term that lowers the policy's entropy."
    Params = EntropyPenaltyParams

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `entropy_bonus`, the same term with the other sign."""
        return "each is the other with its sign turned" if name == "entropy_bonus" else None

    def needs(self) -> Needs:
        """Ask for the entropy with its gradient through the whole distribution."""
        return Needs(entropy=True, entropy_gradient=True)

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return +coefficient H_t, [T], H_t in nats (2505.15134)."""
        assert x.entropy_T is not None
        loss_T = settled(self.params.coefficient) * x.entropy_T
        return loss_T, {"method/entropy_penalty/loss": TokenMetric(loss_T.detach(), x.mask_T)}
