"""GRPO's estimator: rewards normalised within their group (DeepSeekMath, arXiv 2402.03300).

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

The standard deviation is the unbiased one (ddof = 1), as public trainers have it; `std: population` gives the other.
Degenerate cases: a group whose rewards are all equal, or that has a single scored response, has zero advantages.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.algos.group_statistics import Divisor, normalized
from megasharp.common.records import Group


class GRPOParams(MethodParams):
    """`std` picks the divisor; `epsilon` keeps a group of nearly equal rewards finite."""

    std: Divisor = Field(
        default="unbiased",
        description="Divisor of the group's variance: unbiased divides by G - 1 as public trainers do, population by "
        "G.",
    )
    epsilon: float = Field(
        default=1e-6,
        ge=0.0,
        description="Number added to the standard deviation, so that groups of nearly equal rewards stay finite.",
    )


class GRPO(Method[GRPOParams]):
    """The group-normalised advantage, the same for all tokens of a response."""

    paper = "2402.03300"
    options = "advantages normalised by the mean and the standard deviation of their group."
    Params = GRPOParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return (r_i - mean(r)) / (std(r) + epsilon), float64 [G]; zeros in a uniform group (2402.03300)."""
        return normalized(rewards_G, self.params.std, self.params.epsilon)
