"""An advantage of its own for each turn of an episode: the discounted rewards from that turn on.

    R_ik = sum_{l >= k} gamma^(l - k) r_il
    A_ik = (R_ik - mean_j R_jk) / (std_j R_jk + epsilon)        j: the responses of the group that have a turn k

r_il is what the environment gave for turn l of response i, and the response's last turn has what is left of its reward:
the rewards of a response add up to its verdict's reward, or to what other methods have made of that. With responses of
one turn this is GRPO. A baseline is of the responses that have a turn k, so it compares what is left to gain at that
turn; states differ between them. DeepSeekMath's process supervision (arXiv 2402.03300, section 4.1.3) adds up step
rewards that are normalised over all steps of a group instead.
Degenerate cases: a turn that one response has alone, or whose returns are all equal, has advantage zero.
"""

from __future__ import annotations

from itertools import accumulate, zip_longest

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method
from megasharp.algos.group_statistics import centred, normalized
from megasharp.algos.grpo import GRPOParams
from megasharp.common.records import Completion, Group


class TurnReturnsParams(GRPOParams):
    """`gamma` discounts later turns; `normalize` divides by the standard deviation."""

    gamma: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Factor on a reward for each turn between it and the turn that it is credited to. 1 does not "
        "discount; 0 credits each turn with its own reward alone.",
    )
    normalize: bool = Field(
        default=True, description="Divide by the standard deviation of a turn's returns; false leaves the difference."
    )


class TurnReturns(Method[TurnReturnsParams]):
    """Group-normalised returns, one for each turn."""

    status = "the usual reward to go; its normalisation ours"
    options = "advantages by turn of an episode: discounted rewards from that turn on, normalised within the group."
    Params = TurnReturnsParams

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Return the advantages of the first turns, float64 [G]."""
        first = [adv_K[0] for adv_K in self.turn_advantages(rewards_G, group)]
        return torch.stack(first) if first else rewards_G

    def turn_advantages(self, rewards_G: Tensor, group: Group) -> list[Tensor]:
        """Return for each response an advantage for each of its turns, float64 [K]."""
        by_response = [
            self._returns(response.completion, reward)
            for response, reward in zip(group.responses, rewards_G.tolist(), strict=True)
        ]
        by_turn = [
            iter(self._compared(torch.tensor([each for each in returns if each is not None], dtype=torch.float64)))
            for returns in zip_longest(*by_response)
        ]
        return [torch.stack([next(by_turn[turn]) for turn in range(len(returns))]) for returns in by_response]

    def _returns(self, completion: Completion, reward: float) -> list[float]:
        """Return the discounted rewards from each turn on."""
        turns = completion.policy_turns
        rewards = [] if completion.episode is None else [turn.reward for turn in completion.episode.turns]
        rewards = rewards[: len(turns) - 1]
        rewards.append(reward - sum(rewards))
        # From the last turn backwards.
        return [*accumulate(reversed(rewards), lambda later, own: own + self.params.gamma * later)][::-1]

    def _compared(self, returns_G: Tensor) -> Tensor:
        if not self.params.normalize:
            return centred(returns_G)
        return normalized(returns_G, self.params.std, self.params.epsilon)
