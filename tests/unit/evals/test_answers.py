"""Counting answers, their entropy, and the vote of most of k samples against enumerating every draw."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from megasharp.common.records import Outcome, Verdict
from megasharp.evals.estimators import ORDERS, columns, majority_at_k
from megasharp.evals.samples import TEXTS_KEPT, AnswerCounts, Answers, ProblemResult

WRONG, CORRECT, FORMAT = Outcome.WRONG, Outcome.CORRECT, Outcome.FORMAT


def counted(*given: tuple[Outcome, str | None]) -> Answers:
    counts = AnswerCounts()
    for outcome, answer in given:
        counts.add(Verdict(outcome, 0.0, answer))
    return counts.answers()


def test_what_counts_as_one_answer() -> None:
    """The same wrong answer is one; a right and a wrong one never are; everything without an answer is one class."""
    given = [(CORRECT, "1"), (CORRECT, "1"), (WRONG, "1"), (WRONG, "2"), (WRONG, None), (FORMAT, None)]
    answers = counted(*given, (Outcome.TIMEOUT, None))
    assert answers == Answers((2, 1, 1), (True, False, False), ("1", "1", "2"), invalid=3, unnamed=0)
    assert answers.entropy == pytest.approx(-sum(x / 7 * math.log(x / 7) for x in (2, 1, 1, 3)))
    assert (answers.total, answers.distinct_correct) == (7, 1)
    assert counted((CORRECT, None)).unnamed == 1
    assert counted((CORRECT, "1"), (CORRECT, "1")).entropy == 0.0


def test_texts_are_bounded_and_long_answers_are_told_apart() -> None:
    answers = counted(*((WRONG, f"{number}") for number in range(TEXTS_KEPT + 5)), (WRONG, "3"))
    assert len(answers.counts) == TEXTS_KEPT + 5 and len(answers.texts) == TEXTS_KEPT
    assert answers.texts[0] == "3"
    long = counted((WRONG, "x" * 5000 + "a"), (WRONG, "x" * 5000 + "b"))
    assert long.counts == (1, 1) and max(map(len, long.texts)) <= 200


def every_draw(labels: list[str | None], right: set[str], k: int) -> Fraction:
    """maj@k by its definition: all C(n, k) draws, ties shared."""
    total = Fraction(0)
    for draw in combinations(labels, k):
        votes = Counter(label for label in draw if label is not None)
        best = [label for label, count in votes.items() if count == max(votes.values())]
        total += Fraction(sum(label in right for label in best), len(best)) if best else Fraction(0)
    return total / math.comb(len(labels), k)


CASES = [
    (["a"] * 4 + ["b"] * 3 + ["c"] * 2 + [None] * 2, {"a"}),
    (["a"] * 3 + ["b"] * 5 + ["c", "d", None], {"a", "c"}),
    ([None] * 6 + ["a"] * 2 + ["b"], {"a"}),
    ([None] * 5, set()),
    (["b"] * 4 + ["c"] * 4, set()),
]


@pytest.mark.parametrize(("labels", "right"), CASES)
def test_a_vote_is_its_expectation_over_all_draws(labels: list[str | None], right: set[str]) -> None:
    answers = counted(*((FORMAT if x is None else CORRECT if x in right else WRONG, x) for x in labels))
    ks = range(1, len(labels) + 1)
    wanted = [float(every_draw(labels, right, k)) for k in ks]
    found = majority_at_k(answers, list(ks), seed=3, orders=20_000)
    # Standard deviation of a share over 20,000 orders is at most 0.0036.
    assert found == pytest.approx(wanted, abs=0.015)
    assert found[0] == pytest.approx(wanted[0], abs=1e-12) and found[-1] == pytest.approx(wanted[-1], abs=1e-12)


def test_a_vote_does_not_depend_on_which_other_ks_are_asked_for() -> None:
    answers = Answers((40, 35, 20), (False, True, False), ("a", "b", "c"), invalid=5, unnamed=0)
    some, all_ = majority_at_k(answers, [1, 8, 64], 1), majority_at_k(answers, [1, 4, 8, 16, 64, 100], 1)
    assert some == [all_[0], all_[2], all_[4]]
    assert majority_at_k(answers, [8], 1) == majority_at_k(answers, [8], 1) != majority_at_k(answers, [8], 2)
    assert all_[-1] == 0.0
    assert ORDERS >= 64


def test_one_answer_alone_wins_every_vote() -> None:
    assert majority_at_k(Answers((9,), (True,), ("a",), 0, 0), [1, 3, 9], 0) == [1.0, 1.0, 1.0]
    assert majority_at_k(Answers((9,), (False,), ("a",), 0, 0), [1, 3, 9], 0) == [0.0, 0.0, 0.0]


def test_a_suites_majority_of_two_is_its_pass_at_1() -> None:
    """Exactly so where there are two answers: a tie counts half. Errors of many problems cancel."""
    rows = []
    for number in range(256):
        correct = 1 + number % 40
        answers = Answers((correct, 64 - correct), (True, False), ("a", "b"), 0, 0)
        rows.append(ProblemResult(f"p{number}", 64, correct, 1, 64 - correct, 0, 0, 0, 0, 64, 0, None, answers))
    errors = []
    for seed in range(10):
        found = columns(rows, [1, 2], seed)
        errors.append(np.mean(found["maj@2"] - found["pass@1"]))
    assert np.std(errors) < 0.004
