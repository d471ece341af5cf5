"""The ramp of the length penalty: the paper's numbers, the run's limit as default, and the scale of rewards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.algos.soft_overlong import SoftOverlong, SoftOverlongParams
from megasharp.common.errors import UserError
from megasharp.common.records import Group


def of_lengths(make_group, rewards: list[float], lengths: list[int]) -> Group:
    group = make_group(rewards)
    responses = (
        dataclasses.replace(r, completion=dataclasses.replace(r.completion, tokens=torch.zeros(n, dtype=torch.int64)))
        for r, n in zip(group.responses, lengths, strict=True)
    )
    return dataclasses.replace(group, responses=tuple(responses))


def reshaped(make_group, lengths: list[int], limit: int, rewards: list[float] | None = None, **params) -> list[float]:
    rewards = rewards or [1.0] * len(lengths)
    method = SoftOverlong(SoftOverlongParams(**params)).within(limit)
    return method.rewards(of_lengths(make_group, rewards, lengths), torch.tensor(rewards).double()).tolist()


def test_the_papers_numbers_are_its_defaults(make_group) -> None:
    got = reshaped(make_group, [0, 16384, 18432, 20480], 20480)
    assert got == [1.0, 1.0, 0.5, 0.0]


def test_ramp_in_tokens(make_group) -> None:
    got = reshaped(make_group, [1, 6, 7, 8, 9, 10, 11], 99, max_tokens=10, cache_tokens=4, factor=2.0)
    assert got == pytest.approx([1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0], rel=1e-12)


def test_no_weight_leaves_rewards_as_they_are(make_group) -> None:
    assert reshaped(make_group, [8, 2], 8, [1.0, 0.0], factor=0.0) == [1.0, 0.0]


@pytest.mark.parametrize(("limit", "cache"), [(1, 1), (4, 1), (32, 6), (20480, 4096)])
def test_recipe_tells_the_response_limit(limit: int, cache: int) -> None:
    recipe = build_recipe(["grpo", "soft_overlong"], {}, reduction=None, constant=float(limit), mini_batches=1)
    assert recipe.methods["soft_overlong"].params == SoftOverlongParams(max_tokens=limit, cache_tokens=cache)
    assert recipe.at(3).methods["soft_overlong"].params.max_tokens == limit


def test_a_ramp_longer_than_the_limit_is_refused() -> None:
    params = {"soft_overlong": SoftOverlongParams(cache_tokens=33)}
    with pytest.raises(UserError, match=r"recipe.soft_overlong: cache_tokens 33 exceeds max_tokens 32.*lower"):
        build_recipe(["grpo", "soft_overlong"], params, reduction=None, constant=32.0, mini_batches=1)


def test_half_the_factor_on_half_the_range_gives_the_papers_advantages(make_group) -> None:
    """Rewards 1 / 0 with factor 0.5 are rewards +1 / -1 with factor 1, shifted and scaled: GRPO sees no difference."""
    lengths, grpo = [10, 10, 3, 7, 9], GRPO(GRPOParams(epsilon=0.0))
    ours, printed = [1.0, 0.0, 1.0, 0.0, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0]
    limits = {"max_tokens": 10, "cache_tokens": 4}
    group = make_group(ours)

    def advantages(rewards: list[float]) -> list[float]:
        return grpo.advantages(torch.tensor(rewards, dtype=torch.float64), group).tolist()

    expected = advantages(reshaped(make_group, lengths, 10, printed, **limits))
    got = advantages(reshaped(make_group, lengths, 10, ours, factor=0.5, **limits))
    assert got == pytest.approx(expected, rel=1e-12)
