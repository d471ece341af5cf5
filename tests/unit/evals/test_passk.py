"""pass@k against exact fractions and against drawing subsets by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.evals.estimators import pass_at_k, pass_at_k_mean


def exact(n: int, correct: int, k: int) -> Fraction:
    return 1 - Fraction(comb(n - correct, k), comb(n, k))


def relative_error(n: int, correct: int, k: int) -> float:
    truth, value = exact(n, correct, k), Fraction(pass_at_k(n, correct, k))
    return float(abs(value - truth) / truth) if truth else float(value)


def test_it_is_the_share_of_subsets_with_a_correct_sample():
    n, correct, k = 7, 2, 3
    subsets = list(combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_every_small_case_is_exact():
    cases = [(n, c, k) for n in range(1, 25) for c in range(n + 1) for k in range(1, n + 1)]
    assert max(relative_error(*case) for case in cases) < 1e-15


@each_case("k", [1, 2, 3, 1024, 4096, 8190, 8191, 8192])
@each_case("correct", [0, 1, 2, 3, 40, 4095, 4096, 4097, 8191, 8192])
def test_thousands_of_samples_keep_their_precision(correct, k):
    assert relative_error(8192, correct, k) < 1e-14


def test_a_million_samples():
    n, k = 1_000_000, 400_000
    both_missed = Fraction((n - k) * (n - k - 1), n * (n - 1))
    assert pass_at_k(n, 2, k) == pytest.approx(float(1 - both_missed), rel=1e-14)
    assert pass_at_k(n, k, 2) == pytest.approx(float(1 - both_missed), rel=1e-14)


def test_edges_are_exact():
    assert pass_at_k(8192, 0, 8192) == 0.0
    assert pass_at_k(8192, 1, 8192) == 1.0
    assert pass_at_k(8192, 4097, 4096) == 1.0
    assert pass_at_k(49, 7, 1) == 7 / 49
    assert pass_at_k(49, 1, 7) == 7 / 49


def test_it_never_falls_with_k_or_with_correct_samples():
    by_k = [pass_at_k(300, 5, k) for k in range(1, 301)]
    by_correct = [pass_at_k(300, correct, 5) for correct in range(301)]
    assert by_k == sorted(by_k)
    assert by_correct == sorted(by_correct)


@each_case(("n", "k"), [(4, 5), (1, 64), (4, 0), (4, -1)])
def test_impossible_k_is_one_line(n, k):
    with pytest.raises(UserError) as caught:
        pass_at_k(n, 0, k)
    assert f"pass@{k}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_mean_over_problems():
    counts = [0, 3, 3, 16, 1]
    assert pass_at_k_mean(counts, 16, 4) == pytest.approx(float(sum(exact(16, c, 4) for c in counts) / 5))
    samples = [16, 8, 16, 16, 4]
    expected = sum(exact(n, c, 4) for n, c in zip(samples, counts, strict=True)) / 5
    assert pass_at_k_mean(counts, samples, 4) == pytest.approx(float(expected))


def test_one_problem_with_too_few_samples_refuses_the_mean():
    with pytest.raises(UserError, match="3 samples per problem cannot give pass@4"):
        pass_at_k_mean([1, 1], [16, 3], 4)
