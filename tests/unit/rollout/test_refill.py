"""Refilling a step: how many prompts each round asks for, what is surplus, when it ends."""

from __future__ import annotations

import pytest

from megasharp.common.records import Group, Prompt, TaskAnswer
from megasharp.rollout.step_request import fill
from megasharp.rollout.tally import SURPLUS


class Source:
    """Hands out groups; the reasons to drop them are given in advance, None keeps."""

    def __init__(self, reasons: list[str | None]) -> None:
        self._reasons = reasons
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, first: int) -> list[Group]:
        self.asked.append((count, first))
        prompt = Prompt("p", "t", "", (1,), TaskAnswer(), "s", 0, 0)
        taken, self._reasons = self._reasons[:count], self._reasons[count:]
        return [Group(f"g{first + i}", prompt, (), 0, reason) for i, reason in enumerate(taken)]


def test_nothing_dropped_is_one_round() -> None:
    source = Source([None] * 9)
    assert [group.id for group in fill(source, 4, 10)] == ["g0", "g1", "g2", "g3"]
    assert source.asked == [(4, 0)]


def test_without_refill_a_step_may_be_short() -> None:
    groups = fill(Source(["easy", None, "easy", None]), 4, 0)
    assert [group.dropped_reason for group in groups] == ["easy", None, "easy", None]


def test_a_round_asks_by_the_share_kept_so_far_and_the_excess_is_surplus() -> None:
    source = Source(["easy", None, "easy", None, None, None, None, None])
    groups = fill(source, 4, 10)
    assert source.asked == [(4, 0), (4, 4)]
    assert [group.dropped_reason for group in groups] == ["easy", None, "easy", None, None, None, SURPLUS, SURPLUS]


@pytest.mark.parametrize(("rounds", "asked"), [(1, [(2, 0), (8, 2)]), (2, [(2, 0), (8, 2), (8, 10)])])
def test_rounds_are_bounded_and_so_is_a_round(rounds: int, asked: list[tuple[int, int]]) -> None:
    source = Source(["hard"] * 50)
    groups = fill(source, 2, rounds)
    assert source.asked == asked
    assert all(group.dropped_reason == "hard" for group in groups)
