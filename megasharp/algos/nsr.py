"""NSR: negative sample reinforcement, only responses that are not correct train (arXiv 2506.01347).

    A_i = 0 if correct, -1 otherwise

It differs from GRPO in having no baseline and no normalisation: an advantage depends on its own response alone.
Printed: the objective; its authors train it under PPO's clip of 0.2 and without a KL penalty.
Degenerate cases: an all-wrong group trains in full, an all-correct one not at all, and group size does not matter.
Wrong answers, missing formats, errors and timeouts count alike.
"""

from __future__ import annotations

from torch import Tensor

from megasharp.algos.base import MethodParams
from megasharp.algos.group_statistics import OutcomeEstimator, correct_of
from megasharp.common.records import Group


class NSR(OutcomeEstimator[MethodParams]):
    """Pushes away from responses that are not correct."""

    paper = "2506.01347"
    options = "responses that are not correct have advantage -1, correct ones 0."

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return 0 for correct responses and -1 for all others, float64 [G]; rewards are not read (2506.01347)."""
        return correct_of(group) - 1.0
