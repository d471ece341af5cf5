"""Thresholds of the success rate, the easiest share, and both."""

from __future__ import annotations

import pytest
from cases import each_case
from pydantic import ValidationError

from megasharp.algos.difficulty_filter import DifficultyFilter, DifficultyFilterParams
from megasharp.common.records import Outcome

SOLVED_OF_FOUR = [0, 1, 2, 3, 4]


def reasons(make_group, solved: list[int], **params: object) -> list[str | None]:
    groups = [make_group([1.0] * n + [0.0] * (4 - n)) for n in solved]
    return DifficultyFilter(DifficultyFilterParams(**params)).select(groups)


@each_case(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["too_hard", None, None, None, "too_easy"]),
        (0.25, 0.75, ["too_hard", "too_hard", None, "too_easy", "too_easy"]),
        (0.2, 0.8, ["too_hard", None, None, None, "too_easy"]),
        (None, 0.5, [None, None, "too_easy", "too_easy", "too_easy"]),
        (0.5, None, ["too_hard", "too_hard", "too_hard", None, None]),
        (None, None, [None] * 5),
    ],
)
def test_thresholds_exclude_themselves(make_group, low, high, expected: list[str | None]) -> None:
    assert reasons(make_group, SOLVED_OF_FOUR, low=low, high=high) == expected


@each_case(
    ("solved", "share", "dropped"),
    [
        ([2, 4, 0, 1], 0.25, [1]),
        ([2, 4, 0, 1], 0.49, [1]),
        ([3, 0, 3, 4, 1, 3, 2, 0], 0.25, [0, 3]),
        ([0, 0, 0, 0], 0.5, [0, 1]),
        ([4, 4, 4], 0.25, []),
        ([], 0.25, []),
    ],
)
def test_easiest_share_of_a_round(make_group, solved: list[int], share: float, dropped: list[int]) -> None:
    got = reasons(make_group, solved, low=None, high=None, drop_easiest=share)
    assert got == ["too_easy" if number in dropped else None for number in range(len(solved))]


def test_both_rules_drop(make_group) -> None:
    got = reasons(make_group, [1, 4, 0, 3], low=0.0, high=1.0, drop_easiest=0.5)
    assert got == [None, "too_easy", "too_hard", "too_easy"]


def test_infra_failures_count_in_no_rate(make_group) -> None:
    method = DifficultyFilter(DifficultyFilterParams())
    half = make_group([1.0, 0.0, 0.0], [Outcome.CORRECT, Outcome.WRONG, Outcome.INFRA])
    full = make_group([1.0, 0.0], [Outcome.CORRECT, Outcome.INFRA])
    none = make_group([0.0], [Outcome.INFRA])
    assert method.select([half, full, none]) == [None, "too_easy", "unscored"]


def test_thresholds_out_of_order() -> None:
    with pytest.raises(ValidationError, match=r"low 0.6 must be below high 0.4"):
        DifficultyFilterParams(low=0.6, high=0.4)


@each_case(("rounds", "further"), [(1, 0), (10, 9)])
def test_first_round_counts(rounds: int, further: int) -> None:
    assert DifficultyFilter(DifficultyFilterParams(max_rounds=rounds)).needs().refill_rounds == further
