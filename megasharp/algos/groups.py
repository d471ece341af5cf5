"""What methods ask of a group: which responses count, whether their rewards differ, how many are correct."""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.types import Group, Outcome, Response


def is_scored(response: Response) -> bool:
    """Whether the verdict says something about the policy; an infra failure does not."""
    return response.verdict.outcome is not Outcome.INFRA


def rewards_of(group: Group) -> Tensor:
    """The verdicts' rewards of the scored responses, float64 [G]."""
    return torch.tensor([r.verdict.reward for r in group.responses if is_scored(r)], dtype=torch.float64)


def correct_of(group: Group) -> Tensor:
    """1 for each correct and 0 for each other scored response, float64 [G]."""
    correct = [r.verdict.outcome is Outcome.CORRECT for r in group.responses if is_scored(r)]
    return torch.tensor(correct, dtype=torch.float64)


def uniform(rewards_G: Tensor) -> bool:
    """Whether there is nothing to compare: fewer than two rewards, or all of them equal."""
    # Compared with each other: the mean of equal rewards may differ from them in the last bit.
    return rewards_G.numel() < 2 or bool((rewards_G == rewards_G[0]).all())


def centred(rewards_G: Tensor) -> Tensor:
    """Rewards less their mean; exactly zero in a uniform group."""
    return torch.zeros_like(rewards_G) if uniform(rewards_G) else rewards_G - rewards_G.mean()
