"""Pass@k training by its analytical advantage (arXiv 2508.10751); `gr_pkpo` in 2511.19942's comparison is the same.

With c of a group's G responses correct, the reward of a subset of k being its best response's:

    R = 1 - C(G-c, k) / C(G, k)          sigma = sqrt(R (1 - R))
    A+ = (1 - R) / (sigma + epsilon)     A- = (1 - R - C(G-c-1, k-1) / C(G-1, k-1)) / (sigma + epsilon)

It differs from GRPO in that correct responses of a group that is often solved get little or nothing: with G - c < k
every advantage is zero. The advantages of a group sum to zero. Printed: all but epsilon, which is the authors' code's.
Unknown: k, which the paper reports to matter little; 4 is a proposal. With k = 1 this is GRPO with `std: population`.
Degenerate cases: groups that are all correct or all wrong have zero advantages. Where a group has fewer than k scored
responses, k is their number (ours: the formula divides by zero there).
"""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import MethodParams
from megasharp.algos.group_statistics import OutcomeEstimator, correct_of
from megasharp.common.records import Group


class PassKTrainingParams(MethodParams):
    """`k` responses stand for one attempt; `epsilon` keeps groups of nearly equal subsets finite."""

    k: int = Field(
        default=4,
        ge=1,
        description="Number of responses that stand for one attempt in pass@k. The paper's value is unknown; 4 is a "
        "proposal. 1 is grpo with std: population; a group with fewer scored responses uses their number.",
    )
    epsilon: float = Field(default=1e-6, gt=0.0, description="Number added to the standard deviation in the divisor.")


class PassKTraining(OutcomeEstimator[PassKTrainingParams]):
    """The advantage of a response in the mean over all subsets that contain it."""

    paper = "2508.10751"
    status = "as printed; k unknown"
    options = "advantages from the pass@k reward of subsets of k responses."
    Params = PassKTrainingParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return A+ for correct and A- for other responses, float64 [G], rewards not read (2508.10751).

        Zeros in a group that is all correct or all wrong; k is at most the number of scored responses.
        """
        correct_G = correct_of(group)
        size, wrong = correct_G.numel(), correct_G.numel() - int(correct_G.sum())
        if wrong in (0, size):
            return correct_G.new_zeros(size)
        k = min(self.params.k, size)
        failing = math.comb(wrong, k) / math.comb(size, k)
        failing_with_it = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        divisor = math.sqrt(failing * (1.0 - failing)) + self.params.epsilon
        return (failing - failing_with_it * (1.0 - correct_G)) / divisor
