"""Dr. GRPO's estimator: rewards less their group's mean, without the division (arXiv 2503.20783).

    A_i = r_i - mean(r)          loss = sum over tokens / (responses * horizon)

Two differences from GRPO: no standard deviation, which weighs up groups that are nearly solved or nearly hopeless, and
a token sum over a constant (the run's response limit) in place of a mean over length, which favours long wrong answers.
Printed: both, and no KL penalty. The division by the number of responses is the mean over the batch.
Degenerate cases: a group whose rewards are all equal, or that has a single scored response, has zero advantages; public
trainers subtract nothing from a single response.
"""

from __future__ import annotations

from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.group_statistics import centred
from megasharp.common.records import Group


class DrGRPO(Method[MethodParams]):
    """The centred reward, the same for all tokens of a response."""

    paper = "2503.20783"
    options = "advantages are rewards minus the group mean, without division."
    reduction = Reduction.TOKEN_SUM_OVER_CONSTANT

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return r_i - mean(r), float64 [G]; zeros in a uniform group (2503.20783)."""
        return centred(rewards_G)
