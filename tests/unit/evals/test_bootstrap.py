"""Intervals: closed forms in float64, and how often they cover a known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megasharp.evals.estimators import Interval, mean_intervals, pass_at_k


def test_many_problems_give_the_normal_interval() -> None:
    """For a mean of 1,000 values all bootstraps approach mean +- 1.96 s / sqrt(n)."""
    values = np.random.default_rng(5).normal(size=(1000, 1))
    (found,) = mean_intervals(values, seed=1, resamples=4000)
    half = 1.96 * values.std() / math.sqrt(1000)
    assert found is not None
    assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_skewed_values_move_both_bounds_towards_the_tail() -> None:
    """Hall 1988: a second-order correct interval of a right-skewed mean reaches further to the right."""
    values = np.random.default_rng(2).exponential(size=(60, 1))
    (found,) = mean_intervals(values, seed=1)
    assert found is not None
    assert found.high - values.mean() > 1.1 * (values.mean() - found.low)


@pytest.mark.parametrize("k", [1, 8, 16])
def test_intervals_cover_the_truth_as_often_as_they_say(k: int) -> None:
    """Suites of 100 problems with 16 samples each; the truth is the mean over the population they come from.

    300 suites: a coverage of 95% is seen as 95 +- 2.5% (two standard deviations); BCa's own error is about a point.
    """
    generator = np.random.default_rng(11)
    estimate = np.array([pass_at_k(16, correct, k) for correct in range(17)])
    population = generator.beta(0.3, 2.0, size=400_000)
    truth = float(np.mean(1.0 - (1.0 - population) ** k))
    suites = estimate[generator.binomial(16, generator.beta(0.3, 2.0, size=(300, 100)))]
    bounds = [mean_intervals(suite[:, None], seed=number, resamples=500)[0] for number, suite in enumerate(suites)]
    covered = np.mean([bound is not None and bound.low <= truth <= bound.high for bound in bounds])
    assert 0.91 <= covered <= 0.98


def test_columns_are_resampled_alike_so_differences_are_paired() -> None:
    generator = np.random.default_rng(0)
    before = generator.uniform(size=200)
    table = np.stack([before, before + 0.01, np.full(200, 0.01)], axis=1)
    one, other, gain = mean_intervals(table, seed=4)
    assert one is not None and other is not None
    assert other.low - one.low == pytest.approx(0.01) and other.high - one.high == pytest.approx(0.01)
    assert gain == Interval(pytest.approx(0.01), pytest.approx(0.01))
    assert mean_intervals(table, seed=4)[:2] == [one, other] != mean_intervals(table, seed=5)[:2]


def test_missing_values_are_left_out_and_nothing_has_no_interval() -> None:
    values = np.random.default_rng(0).uniform(size=50)
    table = np.stack([np.concatenate([values, np.full(30, np.nan)]), np.full(80, np.nan), np.ones(80)], axis=1)
    some, none, ones = mean_intervals(table, seed=0)
    (alone,) = mean_intervals(values[:, None], seed=0)
    assert some is not None and alone is not None
    assert some.low == pytest.approx(alone.low, abs=0.03) and some.high == pytest.approx(alone.high, abs=0.03)
    assert none is None and ones == Interval(1.0, 1.0)


def test_a_large_suite_is_resampled_in_blocks() -> None:
    values = np.random.default_rng(0).uniform(size=(12_000, 2))
    bounds = mean_intervals(values, seed=0, resamples=300)
    assert all(bound is not None and 0.49 < bound.low < bound.high < 0.51 for bound in bounds)
