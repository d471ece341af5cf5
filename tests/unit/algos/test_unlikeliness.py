"""Rewards by the rank of likelihood: both forms by hand, ties, and responses without tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.unlikeliness import Unlikeliness, UnlikelinessParams
from megasharp.common.records import Group, Outcome

# Mean log-probs per token; the fixture's responses have 1, 2, 3 and 4 tokens, so sums would rank them otherwise.
MEANS = [-2.0, -1.5, -1.2, -3.0]
CODE_RANKS, PAPER_RANKS = [1, 2, 3, 0], [2, 1, 0, 3]


def group_with(make_group, means: list[float], rewards: list[float], outcomes: list[Outcome] | None = None) -> Group:
    group = make_group(rewards, outcomes)
    responses = []
    for response, mean in zip(group.responses, means, strict=True):
        logp = torch.full((response.length,), mean) + 0.1 * (torch.arange(response.length) - (response.length - 1) / 2)
        completion = dataclasses.replace(response.completion, policy_logp=logp, sampler_logp=-logp)
        responses.append(dataclasses.replace(response, completion=completion))
    return dataclasses.replace(group, responses=tuple(responses))


def reshaped(group: Group, rewards: list[float], **params: object) -> list[float]:
    return Unlikeliness(UnlikelinessParams(**params)).rewards(group, torch.tensor(rewards).double()).tolist()


def test_the_likely_earn_less(make_group) -> None:
    rewards = [1.0, 0.0, 0.5, 1.0]
    group = group_with(make_group, MEANS, rewards)
    code = [r * (1 - 0.4 * rank / 4) for r, rank in zip(rewards, CODE_RANKS, strict=True)]
    assert reshaped(group, rewards, beta=0.4) == pytest.approx(code, rel=1e-12)
    paper = [r * (1 - 0.4 * (4 - rank) / 4) for r, rank in zip(rewards, PAPER_RANKS, strict=True)]
    assert reshaped(group, rewards, beta=0.4, form="paper") == pytest.approx(paper, rel=1e-12)


def test_no_weight_leaves_rewards_as_they_are(make_group) -> None:
    rewards = [1.0, 0.0, 0.5, 1.0]
    assert reshaped(group_with(make_group, MEANS, rewards), rewards, beta=0.0) == rewards


def test_equal_likelihoods_rank_in_sampling_order(make_group) -> None:
    group = make_group([1.0] * 4)
    assert reshaped(group, [1.0] * 4, beta=1.0) == [1.0, 0.75, 0.5, 0.25]


def test_a_response_without_tokens_is_the_likeliest(make_group) -> None:
    group = group_with(make_group, MEANS, [1.0] * 4)
    empty = dataclasses.replace(group.responses[0].completion, tokens=torch.zeros(0).long(), policy_logp=torch.zeros(0))
    responses = (dataclasses.replace(group.responses[0], completion=empty), *group.responses[1:])
    assert reshaped(dataclasses.replace(group, responses=responses), [1.0] * 4, beta=1.0) == [0.25, 0.75, 0.5, 1.0]


def test_infra_failures_take_no_rank(make_group) -> None:
    """The likeliest response failed: of the three that count, ranks are 1, 2 and 0 of three."""
    outcomes = [Outcome.CORRECT, Outcome.CORRECT, Outcome.INFRA, Outcome.WRONG]
    group = group_with(make_group, MEANS, [1.0, 1.0, 1.0, 0.0], outcomes)
    params = {"unlikeliness": UnlikelinessParams(beta=0.6)}
    recipe = build_recipe(["dr_grpo", "unlikeliness"], params, reduction=None, constant=8.0, mini_batches=1)
    got = [float(s.advantage_T[0]) for s in recipe.advantages([group])]
    rewards = [1 - 0.6 / 3, 1 - 0.6 * 2 / 3, 0.0]
    mean = sum(rewards) / 3
    assert got == pytest.approx([rewards[0] - mean, rewards[1] - mean, 0.0, -mean], rel=1e-12)
