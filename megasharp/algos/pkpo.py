"""PKPO: the reward of a subset of k is its best response's, with the leave-one-out baseline (arXiv 2505.15201).

    A_i = 1 / C(G, k)  sum over subsets I of size k with i in I of  ( max_I r - max_{I without i} r )

That is the paper's transform `sloo_minus_one`, for any rewards; sorted so that r_(0) <= r_(1) <= ... it is

    A_i = 1 / C(G, k)  sum over j with r_(j) < r_i of  C(j, k-2) (r_i - r_(j))

and for 0/1 rewards with c correct (k / G) C(G-c, k-1) / C(G-1, k-1) if correct, 0 otherwise (both derived, checked).
It differs from GRPO in that only responses better than k - 1 others count, and none is negative. `form: fork` leaves
out the factor k / G, as the code behind 2511.19942's comparison does. Printed: the transform. Unknown: k; 4 is a
proposal. Degenerate cases: a group in which no response beats k - 1 others has zero advantages. Where a group has fewer
than k scored responses, k is their number, and a single one has zero (ours).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.common.records import Group


class PKPOParams(MethodParams):
    """`k` responses stand for one attempt; `form: fork` multiplies by G / k."""

    k: int = Field(
        default=4,
        ge=2,
        description="Number of responses that stand for one attempt in pass@k. The paper's value is unknown; 4 is a "
        "proposal. A group with fewer scored responses uses their number.",
    )
    form: Literal["paper", "fork"] = Field(
        default="paper",
        description="Scale of the advantages: paper as printed; fork without the factor k / G, as the code behind the "
        "DS-GRPO comparison has it.",
    )


class PKPO(Method[PKPOParams]):
    """A response's marginal gain in a subset's best reward, averaged over all subsets."""

    paper = "2505.15201"
    status = "as printed; k unknown"
    options = "what a response adds to the best reward of a subset of k."
    Params = PKPOParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return the leave-one-out gains `sloo_minus_one`, float64 [G], in the sorted form (2505.15201).

        The form `fork` has them times G / k; a single response has 0.
        """
        size = rewards_G.numel()
        k = min(self.params.k, size)
        if k < 2:
            return torch.zeros_like(rewards_G)
        scale = (1.0 if self.params.form == "paper" else size / k) / math.comb(size, k)
        best_of_others_G = rewards_G.new_tensor([math.comb(j, k - 2) * scale for j in range(size)])
        gain_GG = (rewards_G[:, None] - rewards_G.sort().values[None, :]).clamp(min=0.0)
        return gain_GG @ best_of_others_G
