"""Unlikeliness reward: correct responses that the policy holds likely earn less (arXiv 2506.02355).

    r_i' = r_i (1 - beta rank_i / G)          rank 0: the group's least likely response, G - 1: its most likely

That is the authors' code, with the mean log-prob per token as likelihood, from what the engine recorded of the policy.
`form: paper` is r_i (1 - beta (G - rank) / G) with ranks from the most likely response down. Whether those count from 0
or 1 is not known here: from 1 the two forms are equal, so `paper` counts from 0, and then costs all responses beta / G
more. Printed: beta = 0.25 (in the authors' runs with 32 responses, two passes per batch, KL 0.1).
It changes rewards only; the estimator is the recipe's. beta = 0 leaves rewards as they are.
Degenerate cases: an all-correct group gains advantages, which GRPO normalises to full size; a reward of 0 stays 0. A
negative reward would shrink for LIKELY responses: name this method before one that makes rewards negative. Equal
log-probs rank in sampling order; a response without tokens has log-prob 0.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams
from megasharp.algos.group_statistics import mean_logp
from megasharp.common.records import Group


class UnlikelinessParams(MethodParams):
    """`beta` is the share of its reward that the most likely response loses; `form` numbers the ranks."""

    beta: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Share of its reward that the most likely response of a group loses; the others lose less by "
        "rank. The paper uses 0.25. 0: no change.",
    )
    form: Literal["code", "paper"] = Field(
        default="code",
        description="Numbering of ranks: code as in the authors' code, where the least likely response loses nothing; "
        "paper as printed, where every response loses beta / G more.",
    )


class Unlikeliness(Method[UnlikelinessParams]):
    """Rewards scaled by the rank of their response's likelihood."""

    paper = "2506.02355"
    status = "from the authors' code"
    options = "likely correct responses earn less."
    Params = UnlikelinessParams

    def rewards(self, group: Group, rewards_G: Tensor) -> Tensor:
        """Return r_i (1 - beta rank_i / G), float64 [G], least likely first (the code of 2506.02355).

        Under `form: paper` each rank is one higher.
        """
        likelihood_G = rewards_G.new_tensor([mean_logp(response) for response in group.responses])
        # The second argsort turns an order into ranks; a stable one keeps ties in sampling order.
        rank_G = likelihood_G.argsort(stable=True).argsort().to(rewards_G.dtype)
        likelier_G = rank_G if self.params.form == "code" else rank_G + 1.0
        return rewards_G * (1.0 - self.params.beta * likelier_G / max(rewards_G.numel(), 1))
