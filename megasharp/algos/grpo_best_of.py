"""Best-of training: only the best response of a group has an advantage, by how much it beats the second (2503.19595).

    A_i = max_j r_j - max_{j != i} r_j          which is r_max - r_second for the best response, 0 for all others

The leave-one-out advantage of the objective "best of G". It differs from GRPO in that nothing is negative, and that a
group with two correct responses trains nothing. Printed as above; verl's `grpo_passk` divides by the group's standard
deviation by default, which the paper does not.
Degenerate cases: where the best reward is shared, all advantages are zero; so is that of a single scored response,
where public code raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.common.records import Group


class GRPOBestOf(Method[MethodParams]):
    """Reinforces the one response that solves what the others do not."""

    paper = "2503.19595"
    options = "it reinforces the one response that solves what the others of its group do not."

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return r_max - r_second for the best response and 0 for all others, float64 [G] (2503.19595)."""
        advantages_G = torch.zeros_like(rewards_G)
        if rewards_G.numel() > 1:
            # Where two responses share the best reward, their difference makes all advantages 0.
            best, second = rewards_G.topk(2).values
            advantages_G[rewards_G.argmax()] = best - second
        return advantages_G
