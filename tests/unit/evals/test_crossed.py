"""Crossed intervals: against closed forms, least squares and known quantiles; and how often they are falsely bold."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt, tan

import numpy as np
import pytest
from simulate_intervals import Binary, Normal, Setting, false_rates, power

from megasharp.evals.crossed import Crossed, Values, adjusted, bold, crossed, t_quantile, t_tail


def test_students_quantiles_are_the_closed_forms_and_the_tables() -> None:
    """Closed forms for 1, 2 and 4 degrees of freedom down to tails of 1e-10; printed tables beyond."""
    for tail in (0.9, 0.5, 0.05, 0.005, 1e-6, 1e-10):
        at = np.asarray(tail)
        assert t_quantile(at, 1) == pytest.approx(1.0 / tan(pi * tail / 2), rel=1e-5)
        a = tail * (2.0 - tail)
        assert t_quantile(at, 2) == pytest.approx((1.0 - tail) * sqrt(2.0 / a), rel=1e-5)
        # Shaw 2006, equation 38, at alpha = 4u(1-u), u = tail/2.
        root = sqrt(a)
        angle = np.arccos(root) / 3.0
        assert t_quantile(at, 4) == pytest.approx(2.0 * sqrt(np.cos(angle) / root - 1.0), rel=1e-5)
    for freedom, quantile in ((3, 3.18245), (9, 2.26216), (29, 2.04523), (255, 1.96931), (11999, 1.96016)):
        assert t_quantile(np.asarray(0.05), freedom) == pytest.approx(quantile, abs=2e-5)
    assert t_tail(np.array([1.0, 2.0, 1e6]), 1) == pytest.approx([0.5, 1 - 2 / pi * np.arctan(2.0), 2 / pi * 1e-6])


def of(value: float, runs: int = 3, problems: float = 0.0, residual: float = 0.0) -> Crossed:
    """A difference whose runs' estimate is 1."""
    parts = ((np.asarray(1.0), runs - 1),)
    return Crossed(np.asarray(value), parts, np.asarray(problems), np.asarray(residual), (runs, runs), 31)


def test_components_are_added_each_with_its_own_quantile_and_none_is_below_zero() -> None:
    two, thirty = 4.30265, 2.04227
    assert of(5.0).half_width() == pytest.approx(two, rel=1e-5)
    assert of(5.0, problems=4.0, residual=1.0).half_width() == pytest.approx(sqrt(two**2 + 3.0 * thirty**2), rel=1e-5)
    # The interaction's part is larger than what the problems show: no subtraction below the runs'.
    assert of(5.0, problems=0.5, residual=2.0).half_width() == pytest.approx(two, rel=1e-5)
    lucky = replace(of(5.0, problems=4.0, residual=3.0), runs=((np.asarray(0.0), 2),))
    assert lucky.half_width() == pytest.approx(2.0 * thirty, rel=1e-5)
    assert of(5.0).interval().low == pytest.approx(5.0 - two, rel=1e-4)


def test_the_p_value_is_where_the_interval_ends_at_zero() -> None:
    """So that bold type, the interval and the p-value never disagree."""
    for value in (0.3, 4.0, 4.6, 60.0, 1e4):
        one = of(value, problems=0.3, residual=0.1)
        p = float(one.p_value())
        assert one.half_width(1.0 - p) == pytest.approx(value, rel=1e-6)
        assert (p <= 0.05) == (one.interval().low > 0.0)
    assert of(0.0).p_value() == pytest.approx(1.0)
    same = crossed(np.zeros((2, 4)), np.zeros((2, 4)), paired=False)
    assert same is not None and same.p_value() == pytest.approx(1.0)


def by_hand(value_RP: Values) -> tuple[Values, Values, float]:
    """Run means, problem means and residual mean square, by dummy variables and least squares; NaN is left out."""
    runs, problems = value_RP.shape
    run, problem = (index.ravel() for index in np.indices((runs, problems)))
    design = np.concatenate([np.eye(runs)[run], np.eye(problems)[problem]], axis=1)
    known = ~np.isnan(value_RP.ravel())
    effect, *_ = np.linalg.lstsq(design[known], value_RP.ravel()[known], rcond=None)
    fitted_RP = (design @ effect).reshape(runs, problems)
    rest = (value_RP - fitted_RP)[~np.isnan(value_RP)]
    freedom = known.sum() - runs - problems + 1
    return fitted_RP.mean(axis=1), fitted_RP.mean(axis=0), float((rest**2).sum() / freedom)


@pytest.mark.parametrize("paired", [False, True])
def test_the_parts_are_those_of_least_squares_with_and_without_missing_problems(paired: bool) -> None:
    rng = np.random.default_rng(3)
    before, after = rng.normal(size=(3, 8)), rng.normal(size=(3 if paired else 4, 8)) + 0.5
    before[0, 2] = after[1, 5] = after[2, 0] = np.nan
    # A problem that one side never measured, and a run without the metric.
    before, after = (np.concatenate([each, each[:, :1]], axis=1) for each in (before, after))
    before[:, -1] = np.nan
    nothing = np.full((1, 9), np.nan)
    found = crossed(
        np.concatenate([before, nothing]), np.concatenate([after, after[:1]]) if paired else after, paired=paired
    )
    assert found is not None and found.problem_count == 8
    sides = [by_hand((after - before)[:, :8])] if paired else [by_hand(before[:, :8]), by_hand(after[:, :8])]
    problems = sides[0][1] if paired else sides[1][1] - sides[0][1]
    assert found.difference == pytest.approx(problems.mean())
    assert found.problems == pytest.approx(problems.var(ddof=1) / 8)
    for (estimate, freedom), (runs, _, _) in zip(found.runs, sides, strict=True):
        assert (estimate, freedom) == (pytest.approx(runs.var(ddof=1) / len(runs)), len(runs) - 1)
    assert found.residual == pytest.approx(sum(rest / len(runs) / 8 for runs, _, rest in sides))


@pytest.mark.parametrize("paired", [False, True])
def test_of_several_suites_the_means_are_averaged_on_the_same_runs(paired: bool) -> None:
    """Each suite by least squares: runs by their averages, problems and residual as independent parts of a half."""
    rng = np.random.default_rng(4)
    before, after = rng.normal(size=(3, 12)), rng.normal(size=(3 if paired else 4, 12)) + 0.5
    before[0, 2] = after[1, 9] = np.nan
    # A run without any problem of the second suite has no average.
    lame = np.concatenate([np.ones(8), np.full(4, np.nan)])[None]
    found = crossed(
        np.concatenate([before, lame]),
        np.concatenate([after, after[:1]]) if paired else after,
        paired=paired,
        sizes=(8, 4),
    )
    assert found is not None and (found.problem_count, found.counts) == (4, (3, 3 if paired else 4))
    parts = [slice(0, 8), slice(8, 12)]
    sides = [after - before] if paired else [before, after]
    fits = [[by_hand(side[:, part]) for side in sides] for part in parts]
    problems = [fit[-1][1] - (0.0 if paired else fit[0][1]) for fit in fits]
    assert found.difference == pytest.approx((problems[0].mean() + problems[1].mean()) / 2)
    assert found.problems == pytest.approx(problems[0].var(ddof=1) / 8 / 4 + problems[1].var(ddof=1) / 4 / 4)
    for (estimate, freedom), one, other in zip(found.runs, *fits, strict=True):
        average = (one[0] + other[0]) / 2
        assert (estimate, freedom) == (pytest.approx(average.var(ddof=1) / len(average)), len(average) - 1)
    residual = [sum(rest / len(runs) for runs, _, rest in fit) / len(fit[0][1]) for fit in fits]
    assert found.residual == pytest.approx(sum(residual) / 4)


def test_an_average_of_suites_by_hand() -> None:
    """Differences of 0.1 and 0.3 in the first suite, 0.4 and 0.8 in the second; runs are as far off in both."""
    off = np.array([-0.1, 0.0, 0.1])[:, None]
    found = crossed(np.zeros((3, 4)), np.array([0.1, 0.3, 0.4, 0.8]) + off, paired=True, sizes=(2, 2))
    assert found is not None and found.difference == pytest.approx((0.2 + 0.6) / 2)
    # Not the sum of two independent parts, which would be a half: one run is off in both suites.
    assert found.runs == ((pytest.approx(0.01 / 3), 2),)
    assert found.problems == pytest.approx((0.02 / 2 + 0.08 / 2) / 4)
    assert found.residual == pytest.approx(0.0, abs=1e-12)
    one = crossed(np.zeros((3, 4)), np.array([0.1, 0.3, 0.4, 0.8]) + off, paired=True)
    assert one is not None and one.problems > found.problems
    assert crossed(np.zeros((3, 4)), np.ones((3, 4)), paired=True, sizes=(3, 1)) is None


def test_an_average_holds_zero_as_often_as_it_should() -> None:
    """Suites of 40 and of 12 problems, on which a run is off by the same; 600 tables."""
    rng = np.random.default_rng(9)
    off = rng.normal(0.0, 0.05, (600, 5, 1))
    suites = [off + rng.normal(0.0, 0.2, (600, 1, size)) + rng.normal(0.0, 0.3, (600, 5, size)) for size in (40, 12)]
    after = np.concatenate(suites, axis=-1)
    found = crossed(np.zeros_like(after), after, paired=True, sizes=(40, 12))
    assert found is not None and 0.005 < (found.p_value() < 0.05).mean() < 0.06


def test_over_runs_alone_it_is_welchs_interval() -> None:
    """NIST's example of Welch's degrees of freedom by hand: 2.78 here, so the quantile is that of 2."""
    before = np.array([[1.0, 3.0], [2.0, 4.0], [6.0, 8.0]])
    after = np.array([[4.0, 5.0], [5.0, 6.0], [4.5, 5.5], [5.5, 6.5]])
    found = crossed(before, after, paired=False)
    assert found is not None
    one, other = before.mean(axis=1).var(ddof=1) / 3, after.mean(axis=1).var(ddof=1) / 4
    freedom = (one + other) ** 2 / (one**2 / 2 + other**2 / 3)
    assert int(freedom) == 2
    half = t_quantile(np.asarray(0.05), 2) * sqrt(one + other)
    assert found.over_runs().high == pytest.approx(float(found.difference + half))
    assert found.interval().high >= found.over_runs().high


def test_a_difference_of_differences_holds_zero_as_often_as_it_should() -> None:
    """Two changes of the same size, each of 5 pairs of runs and 40 problems of its own; 600 tables."""
    rng = np.random.default_rng(8)

    def change(runs: float, problems: float) -> Crossed:
        solved = rng.normal(0.1, runs, (600, 5, 1)) + rng.normal(0.0, problems, (600, 1, 40))
        found = crossed(np.zeros((600, 5, 40)), solved + rng.normal(0.0, 0.3, (600, 5, 40)), paired=True)
        assert found is not None
        return found

    between = change(0.05, 0.3).less(change(0.02, 0.5))
    assert between.difference.std() > 0.05
    assert 0.005 < (between.p_value() < 0.05).mean() < 0.06


def test_one_run_on_a_side_has_no_crossed_interval() -> None:
    assert crossed(np.zeros((1, 30)), np.ones((3, 30)), paired=False) is None
    assert crossed(np.zeros((3, 1)), np.ones((3, 1)), paired=True) is None


def test_holms_correction_by_hand() -> None:
    """.01, .013 and .02 of four: 4 x .01, 3 x .013, then .04 is carried on to 2 x .02; .03 alone is below 5 %."""
    p = [0.02, None, 0.01, 0.3, 0.013]
    assert adjusted(p) == pytest.approx([0.04, np.nan, 0.04, 0.3, 0.04], nan_ok=True)
    assert list(bold(p)) == [True, False, True, False, True]
    # The second of two misses 5 %, and the third is not looked at though it would be below it.
    assert list(bold([0.001, 0.03, 0.04])) == [True, False, False]
    assert list(bold([None, None])) == [False, False]


NULL: list[tuple[Setting, tuple[int, int, int]]] = [
    (Normal(1.0, 0.0, 0.0), (3, 3, 30)),
    (Normal(0.8, 0.2, 0.0), (2, 2, 30)),
    (Normal(0.8, 0.2, 0.0), (3, 3, 100)),
    (Normal(0.7, 0.2, 0.1), (3, 3, 30)),
    (Normal(0.0, 1.0, 0.0), (5, 5, 12)),
    (Normal(0.0, 0.0, 1.0), (2, 2, 30)),
    (Normal(0.6, 0.2, 0.2, ratio=4.0), (2, 5, 30)),
    (Normal(1.0, 0.0, 0.0, ratio=9.0), (3, 3, 12)),
    (Binary(0.0, 1.5, 0.3, 0.5, 0.5, n=1, k=1), (2, 3, 30)),
    (Binary(-3.0, 1.5, 0.5, 0.0, 0.5, n=16, k=8), (3, 3, 30)),
    (Binary(-4.0, 1.0, 0.0, 0.0, 0.0, n=1, k=1), (2, 2, 30)),
]


@pytest.mark.parametrize(("setting", "size"), NULL, ids=str)
def test_methods_that_do_not_differ_are_rarely_bold(setting: Setting, size: tuple[int, int, int]) -> None:
    """At most 5 % of single differences, and of tables of four rows, up to three standard errors of 2,000 tables."""
    found = false_rates(setting, size, tables=2000, rows=4, beside=["old"])
    for name in ("pairs", "independent"):
        if name in found:
            assert found[name].max() <= 0.05 + 3 * sqrt(0.05 * 0.95 / 2000), (name, found[name])
    if size[:2] == (3, 3) and setting.runs in (0.7, 0.8):
        # The simulation can fail: intervals over problems with all seeds of one sign are bold in 16 to 23 %.
        assert 0.155 < found["old"][0] < 0.235


def test_true_differences_are_found() -> None:
    """A rule that is never bold would pass the test above; five runs find differences of five standard deviations."""
    assert min(power((5, 5, 64), 5.0, 0.05, 500).values()) > 0.9
    assert min(power((3, 3, 64), 8.0, 0.05, 500).values()) > 0.9
    assert max(power((2, 2, 64), 0.0, 0.05, 500).values()) < 0.06
