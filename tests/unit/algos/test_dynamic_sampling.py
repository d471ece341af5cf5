"""The groups that are dropped, and the number of rounds that replace them."""

from __future__ import annotations

from cases import each_case

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.dynamic_sampling import DynamicSampling, DynamicSamplingParams
from megasharp.common.records import Outcome


@each_case(
    ("rewards", "reason"),
    [
        ([1.0, 0.0, 1.0], None),
        ([0.1, 0.0, 0.0], None),
        ([1.0, 1.0], "uniform"),
        ([0.0, 0.0, 0.0], "uniform"),
        ([0.1, 0.1, 0.1], "uniform"),
        ([1.0], "uniform"),
        ([], "uniform"),
    ],
)
def test_equal_rewards_are_dropped(make_group, rewards: list[float], reason: str | None) -> None:
    method = DynamicSampling(DynamicSamplingParams())
    assert method.select([make_group([0.0, 1.0]), make_group(rewards)]) == [None, reason]


def test_infra_failures_are_no_difference(make_group) -> None:
    outcomes = [Outcome.CORRECT, Outcome.INFRA, Outcome.CORRECT]
    assert DynamicSampling(DynamicSamplingParams()).select([make_group([1.0, 0.0, 1.0], outcomes)]) == ["uniform"]


def test_first_round_counts() -> None:
    def rounds(**params: int) -> int:
        table = {"dynamic_sampling": DynamicSamplingParams(**params)}
        recipe = build_recipe(["grpo", "dynamic_sampling"], table, reduction=None, constant=8.0, mini_batches=1)
        return recipe.needs.refill_rounds

    assert rounds() == 9
    assert rounds(max_rounds=1) == 0


def test_dropped_groups_do_not_train(make_group) -> None:
    recipe = build_recipe(["psr", "dynamic_sampling"], {}, reduction=None, constant=8.0, mini_batches=1)
    groups = recipe.select([make_group([1.0, 1.0]), make_group([1.0, 0.0, 0.0])])
    assert [group.dropped_reason for group in groups] == ["uniform", None]
    assert len(recipe.advantages(groups)) == 3
