"""Only relative negatives train: the "-N" of GRPO-N and GSPO-N (arXiv 2510.04028, section 4.1 and appendix B.5).

    J_N = 1/G sum_i 1/|y_i| sum_t 1[A_it < 0] (the usual term of token t)

Tokens whose advantage is not negative get advantage 0; they still count in every denominator, 1/G and 1/|y_i| alike, as
printed. The sign is that of the advantage when this method's turn comes: name it after others that shift advantages.
`positive_weight` is ours: a ramp from 1 to 0 trains by all responses first and by relative negatives later, the paper's
two stages in their order.
Degenerate cases: groups that are all correct or all wrong have zero advantages before and after; a step without a
negative advantage has no policy gradient, penalties remain.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Coefficient, Method, MethodParams, TokenMetric, TokenMetrics, settled
from megasharp.algos.psr import PSR
from megasharp.common.records import TokenInputs


class NegativeOnlyParams(MethodParams):
    """`positive_weight` multiplies advantages that are not negative."""

    positive_weight: Coefficient = Field(
        default=0.0,
        description="Factor of advantages that are not negative, a number or a ramp. 0 is the paper's; a ramp from 1 "
        "to 0 begins as the estimator alone and ends with relative negatives only.",
    )


class NegativeOnly(Method[NegativeOnlyParams]):
    """Advantages that are not negative become zero, or smaller by a ramp."""

    paper = "2510.04028"
    options = "advantages above 0 become 0, or smaller."
    Params = NegativeOnlyParams

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse `psr`, which has no negative advantage."""
        return "it has no negative advantage, so nothing would train" if isinstance(other, PSR) else None

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return A_t where it is negative, else `positive_weight` A_t, float64 [T] (2510.04028, B.5).

        The metric is the share of negative ones.
        """
        negative_T = adv_T < 0
        metrics = {"method/negative_only/kept": TokenMetric(negative_T.to(x.mask_T.dtype), x.mask_T)}
        return torch.where(negative_T, adv_T, settled(self.params.positive_weight) * adv_T), metrics
