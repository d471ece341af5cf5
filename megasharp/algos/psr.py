"""PSR: positive sample reinforcement, only correct responses train (arXiv 2506.01347).

    A_i = 1 if correct, 0 otherwise

It differs from GRPO in having no baseline and no normalisation: an advantage depends on its own response alone.
Printed: the objective; its authors train it under PPO's clip of 0.2 and without a KL penalty.
Degenerate cases: an all-correct group trains in full, an all-wrong one not at all, and group size does not matter.
"""

from __future__ import annotations

from torch import Tensor

from megasharp.algos.base import MethodParams
from megasharp.algos.group_statistics import OutcomeEstimator, correct_of
from megasharp.common.records import Group


class PSR(OutcomeEstimator[MethodParams]):
    """Reinforces correct responses."""

    paper = "2506.01347"
    options = "correct responses have advantage 1, all others 0."

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return 1 for correct responses and 0 for all others, float64 [G]; rewards are not read (2506.01347)."""
        return correct_of(group)
