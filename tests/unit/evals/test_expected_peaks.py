"""The flattery of a peak: closed forms of order statistics and of the Beta distribution, and a simulation."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
import pytest
from expected_peaks import (
    EVALUATIONS,
    PROBLEMS,
    Rates,
    average_deviation,
    fit,
    largest_normal,
    rows,
    solved_deviation,
)


def test_largest_of_few_normals_in_closed_form() -> None:
    assert largest_normal(1) == pytest.approx(0.0, abs=1e-12)
    assert largest_normal(2) == pytest.approx(1 / sqrt(pi))
    assert largest_normal(3) == pytest.approx(1.5 / sqrt(pi))


def test_uniform_rates_in_closed_form() -> None:
    """Beta(1, 1): E (1 - p)^k = 1 / (k + 1), E p (1 - p) = 1 / 6."""
    uniform = Rates(1.0, 1.0)
    assert [uniform.failing(k) for k in (1, 8, 16)] == pytest.approx([1 / 2, 1 / 9, 1 / 17])
    assert average_deviation(uniform, 30) == pytest.approx(sqrt(1 / 6 / 240))
    assert solved_deviation(uniform, 30) == pytest.approx(sqrt((1 / 9 - 1 / 17) / 30))
    fitted = fit(0.5, 8 / 9)
    assert (fitted.a, fitted.b) == pytest.approx((1.0, 1.0), rel=1e-6)


def test_cells_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="no distribution"):
        fit(0.5, 0.4)


def test_peaks_of_aime24_by_simulation() -> None:
    """Equal checkpoints: 1,000 sets of 30 problems, 40 evaluations of 8 samples each."""
    aime = {row.name: row for row in rows()}
    rates = fit(0.3542, 0.5236)
    rng = np.random.default_rng(0)
    p_SP = rng.beta(rates.a, rates.b, (1000, PROBLEMS["AIME24"]))
    correct_ESP = rng.binomial(8, p_SP, (EVALUATIONS, *p_SP.shape))
    average_ES, solved_ES = correct_ESP.mean(axis=-1) / 8, (correct_ESP > 0).mean(axis=-1)
    raised = 100 * (average_ES.max(axis=0) - p_SP.mean(axis=-1)).mean()
    assert raised == pytest.approx(aime["AVG@8 AIME24"].flattery(), abs=0.15)
    true_S = (1.0 - (1.0 - p_SP) ** 8).mean(axis=-1)
    # Few problems are in doubt, so the counts are not normal: the bound is what the formula is used for.
    assert 100 * (solved_ES.max(axis=0) - true_S).mean() == pytest.approx(aime["PASS@8 AIME24"].flattery(), abs=0.6)


def test_between_methods_little_is_left() -> None:
    for row in rows():
        assert 0 < row.flattery(10) < row.flattery(40)
        assert abs(row.unfairness) < 0.2
