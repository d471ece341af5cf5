"""Weighted REINFORCE: negative samples in full, positive ones by a small weight (W-REINFORCE, arXiv 2506.01347).

    A_i = lambda if correct, -1 otherwise

It differs from GRPO in having no baseline and no normalisation. Printed: the objective lambda PSR + NSR and
lambda = 0.1, here `positive_weight`. At 0 it is `nsr`; its gradient is lambda times that of `psr` plus that of `nsr`.
Degenerate cases: groups of any composition and size train, as an advantage depends on its own response alone.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import MethodParams
from megasharp.algos.group_statistics import OutcomeEstimator, correct_of
from megasharp.common.records import Group


class WReinforceParams(MethodParams):
    """`positive_weight` is lambda, the advantage of a correct response."""

    positive_weight: float = Field(
        default=0.1,
        ge=0.0,
        description="Advantage of a correct response (lambda in the paper, which uses 0.1); all others have -1. 0 is "
        "nsr.",
    )


class WReinforce(OutcomeEstimator[WReinforceParams]):
    """Weak reinforcement of correct responses, full reinforcement away from all others."""

    paper = "2506.01347"
    options = "a small advantage for correct responses, -1 for all others."
    Params = WReinforceParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return lambda for correct responses and -1 for all others, float64 [G]; rewards are not read (2506.01347)."""
        correct_G = correct_of(group)
        return self.params.positive_weight * correct_G - (1.0 - correct_G)
