"""Differential entropy control: a bonus on correct responses, a penalty on others (arXiv 2511.19942, section 4.8.2).

    J = J_GRPO + correct E_correct[H] - incorrect E_incorrect[H]
    loss_t += -correct H_t on tokens of correct responses,  +incorrect H_t on all others

H_t is the entropy of pi(. | y_<t) in nats at the rollout temperature, with gradient through the whole distribution. The
objective's formula is lost in the text and derived from its words; so are the coefficients, 0.001 is a proposal. How
each expectation is normalised is not said. Here each token's term is reduced as the policy's loss is: under the token
mean the divisor is all tokens, so that a share f of correct tokens weighs E_correct by f, and loss and gradient go to
zero smoothly with f. Correct is the verifier's word, not the advantage's sign. Degenerate cases: without correct
responses only the penalty remains, and the other way round; equal and opposite coefficients do not cancel.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Coefficient, Method, MethodParams, Needs, TokenMetric, TokenMetrics, settled
from megasharp.common.records import TokenInputs


class DifferentialEntropyParams(MethodParams):
    """Coefficients of the bonus on correct responses and of the penalty on incorrect ones; both from zero up."""

    correct: Coefficient = Field(
        default=0.001,
        description="Factor of the entropy bonus on tokens of correct responses, a number or a ramp. The paper's "
        "value is unknown; 0.001 is a proposal. 0: no bonus.",
    )
    incorrect: Coefficient = Field(
        default=0.001,
        description="Factor of the entropy penalty on tokens of all other responses, a number or a ramp. The paper's "
        "value is unknown; 0.001 is a proposal. 0: no penalty.",
    )


class DifferentialEntropy(Method[DifferentialEntropyParams]):
    """Rewards entropy where the answer is right, punishes it elsewhere."""

    paper = "2511.19942"
    status = "derived: the formula is lost in the text"
    options = "an entropy bonus on correct responses and a penalty on others."
    Params = DifferentialEntropyParams

    def needs(self) -> Needs:
        """Ask for the entropy with its gradient through the whole distribution."""
        return Needs(entropy=True, entropy_gradient=True)

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return -correct H on correct responses and +incorrect H on others, [T] (derived from 2511.19942, 4.8.2)."""
        assert x.entropy_T is not None
        bonus, penalty = settled(self.params.correct), settled(self.params.incorrect)
        loss_T = torch.where(x.correct_T > 0, -bonus * x.entropy_T, penalty * x.entropy_T)
        return loss_T, {"method/differential_entropy/loss": TokenMetric(loss_T.detach(), x.mask_T)}
