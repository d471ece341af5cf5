"""Meanings of a unique solution: small cases by hand, the exact solver by symbols, and Table 7's means."""

from __future__ import annotations

import itertools
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from cases import each_case

from megasharp.studies.smoothing import multiplicity
from megasharp.studies.smoothing.multiplicity import (
    EXACT,
    MEANINGS,
    WRITERS,
    Counts,
    count_written,
    draw_counts,
    judge,
    means,
    minimal,
    swapped,
    whole,
)
from megasharp.studies.study import Outcome
from megasharp.tasks.arithmetic import parse


@each_case(
    ("numbers", "target", "swaps", "written", "any_difference"),
    [
        ((44, 19, 35), 98, 3, 6, 12),  # a sum: three trees without an order, 3! texts, 3! x 2 trees
        ((2, 3), 5, 1, 2, 2),
        ((7, 3), 4, 1, 1, 1),
        ((5, 5), 25, 1, 1, 1),  # equal numbers are written alike
        ((90, 20, 3), 67, 3, 4, 4),  # 90-20-3, 90-3-20, 90-(20+3), 90-(3+20)
    ],
)
def test_counts_by_hand(numbers: tuple[int, ...], target: int, swaps: int, written: int, any_difference: int) -> None:
    found = [count_written(numbers, target, write) for write in (swapped, minimal, whole)]
    assert found == [swaps, written, any_difference]


def all_trees(numbers: tuple[str, ...]) -> list[str]:
    """Every tree over the numbers in this order, with all parentheses."""
    if len(numbers) == 1:
        return list(numbers)
    return [
        f"({left}{operator}{right})"
        for cut in range(1, len(numbers))
        for left in all_trees(numbers[:cut])
        for right in all_trees(numbers[cut:])
        for operator in "+-*/"
    ]


def test_any_difference_counts_all_trees() -> None:
    """All 7,680 trees of four numbers, evaluated by the verifier's parser; a few dozen reach the target."""
    numbers, target, reached = (6, 8, 2, 4), 24, set()
    for order in itertools.permutations(map(str, numbers)):
        for text in all_trees(order):
            try:
                form, _ = parse(text, False)
            except ZeroDivisionError:
                continue
            if form.value == Fraction(target):
                reached.add(text)
    assert count_written(numbers, target, whole) == len(reached) > 50


def test_minimal_texts_keep_the_parentheses_that_they_need() -> None:
    one, other = multiplicity.Written("1-2", 0, Fraction(-1)), multiplicity.Written("3*4", 1, Fraction(12))
    texts = [minimal(operator, *pair) for operator in "+-*/" for pair in ((one, other), (other, one))]
    assert texts == ["1-2+3*4", "3*4+1-2", "1-2-3*4", "3*4-(1-2)", "(1-2)*3*4", "3*4*(1-2)", "(1-2)/(3*4)", "3*4/(1-2)"]


def test_draws_can_be_solved_and_finer_meanings_count_more() -> None:
    found = draw_counts(3, Random(1), 30)
    assert 0.02 < found.solvable < 0.08
    exact, *others = (found.count_P[meaning] for meaning in MEANINGS)
    assert (exact >= 1).all() and all((other >= exact).all() for other in others)
    assert (found.count_P["any difference"] >= found.count_P["as written"]).all()


def made(three: float, four: float, meaning: str = EXACT) -> dict[int, Counts]:
    """Fifty problems a length with half a solution more or less; other meanings count one solution."""

    def counts(mean: float, solvable: float) -> Counts:
        around_P = mean + np.tile([-0.5, 0.5], 25)
        return Counts(solvable, {each: around_P if each == meaning else np.ones(50) for each in MEANINGS})

    return {3: counts(three, 0.1), 4: counts(four, 0.3)}


def test_means_and_errors_by_hand() -> None:
    """A quarter of the mixed set has three numbers; its variance has the part within and the part between lengths."""
    own = means(made(2.0, 6.0), EXACT)
    within = 0.25 * 50 / 49
    assert own["Countdown-3"].value == pytest.approx(2.0) and own["Countdown"].value == pytest.approx(5.0)
    assert own["Countdown-3"].error == pytest.approx(np.sqrt(within / 50 + within / 200))
    between = 0.25 * 0.75 * 4.0**2
    ours = (0.25**2 + 0.75**2) * within / 50
    assert own["Countdown"].error == pytest.approx(np.sqrt(ours + (within + between) / 200))


def test_the_claims_can_hold_and_fail() -> None:
    fitting = 6.5, (15.7 - 0.25 * 6.5) / 0.75
    cases = (made(*fitting), made(*fitting, "as written"), made(6.5, 3.0), made(2.0, 1.0))
    verdicts = [[claim.outcome for claim in judge(found)] for found in cases]
    good, partly, bad = Outcome.REPRODUCED, Outcome.PARTLY, Outcome.DIFFERS
    assert verdicts == [[good, bad, good], [bad, good, good], [partly, bad, bad], [bad, bad, bad]]
    assert set(WRITERS) < set(MEANINGS)
