"""RLOO: a reward less the mean of the OTHER rewards of its group (REINFORCE leave-one-out, arXiv 2402.14740).

    A_i = r_i - mean_{j != i} r_j = G / (G - 1) (r_i - mean(r))

It differs from GRPO in the baseline, which does not contain the response's own reward and so leaves the gradient
unbiased, and in that nothing is divided by a standard deviation. Printed as above.
Degenerate cases: a group whose rewards are all equal has zero advantages. So has a single scored response, whose
baseline would be an empty mean; public trainers leave it its reward.
"""

from __future__ import annotations

from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.algos.group_statistics import centred
from megasharp.common.records import Group


class RLOO(Method[MethodParams]):
    """The leave-one-out advantage, the same for all tokens of a response."""

    paper = "2402.14740"
    options = "advantages are rewards minus the mean of the other responses of the group."

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return G / (G - 1) (r_i - mean(r)), float64 [G]; zeros in a uniform group (2402.14740)."""
        size = rewards_G.numel()
        return size / max(size - 1, 1) * centred(rewards_G)
