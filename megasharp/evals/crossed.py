"""Differences between two methods of which several runs were measured on the same problems: intervals, and bold type.

A method is seen through runs (training with other seeds) and through problems, and both scatter. On run r and problem p
a metric is modelled as

    y_rp = mean + run_r + problem_p + interaction_rp

all four of the method's own; samples drawn for a problem are part of the interaction. Problems are shared by both
methods, so they are subtracted problem by problem. Where both methods have runs of the same seeds, runs are paired by
seed as well: data order and first weights may follow the seed, and pairs hold for any correlation. Else, and where
there are only two, runs are independent (`places_by_seed`).

The variance of the difference of means has three estimates, from the mean squares of the two-way analysis of variance:
`runs`, the variance of the runs' means over R (of the runs and the interaction; one estimate of the pairs, or one a
method); `problems`, the variance of the problems' differences over P (of the problems and the interaction); and
`residual`, the interaction's part, which both of them hold. The half-width h of a two-sided interval is

    h^2 = max(r, p, r + p - t^2(P - 1) residual),    r = sum of t^2(R - 1) runs,    p = t^2(P - 1) problems

where t(d) is Student's quantile with d degrees of freedom: each estimate is multiplied by the quantile of its own
degrees of freedom before they are added up. By Banerjee (1960, Sankhya 22, 357) the interval of r + p then covers at
least its nominal level for any ratio of the variances, under normality; the subtraction, so that the interaction counts
once, and the maximum, so that no component is below zero, are held by simulation (tests, and
`tools/simulate_intervals.py`, whose table beside other rules is in docs/explanation/intervals.md).

The average of S suites is measured on the same runs but on other problems of each suite: `runs` is the variance of the
runs' averages, and `problems` and `residual` are the sums of the suites' own over S^2. P is the smallest suite's.

`bold` decides for a whole table: an interval excludes zero after Holm's step-down correction (1979, Scandinavian
Journal of Statistics 6, 65) over the table's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lgamma

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.estimators import LEVEL, Interval, by_suite

# Float64, of the shape that the name's suffix or the docstring gives.
Values = NDArray[np.float64]

# Differences below this are rounding: metrics are of the order of 1.
_ROUNDING = 1e-12
# The smallest p-value that is told apart from 0.
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Crossed:
    """A difference of means over runs and problems with its estimates of variance; floats, or arrays of one shape.

    `runs` has (estimate, degrees of freedom) once for pairs of runs, or for each of two independent sides; `counts` are
    the numbers of runs on both sides, `problem_count` that of problems.
    """

    difference: Values
    runs: tuple[tuple[Values, int], ...]
    problems: Values
    residual: Values
    counts: tuple[int, int]
    problem_count: int

    def half_width(self, level: float | Values = LEVEL) -> Values:
        """Return the half-width of the two-sided interval of a confidence `level`."""
        tail = 1.0 - np.asarray(level, dtype=np.float64)
        return self._half_width(tail)

    def _half_width(self, tail: Values) -> Values:
        runs = np.sum([t_quantile(tail, freedom) ** 2 * estimate for estimate, freedom in self.runs], axis=0)
        squared = t_quantile(tail, self.problem_count - 1) ** 2
        problems = squared * self.problems
        half: Values = np.sqrt(np.maximum(np.maximum(runs, problems), runs + problems - squared * self.residual))
        return half

    def interval(self, level: float = LEVEL) -> Interval:
        """Return the crossed interval of a single difference."""
        return _around(self.difference, self.half_width(level))

    def less(self, other: Crossed) -> Crossed:
        """Return the difference of two differences that share neither runs nor problems: all variances add up."""
        return Crossed(
            self.difference - other.difference,
            (*self.runs, *other.runs),
            self.problems + other.problems,
            self.residual + other.residual,
            (min(self.counts[0], other.counts[0]), min(self.counts[1], other.counts[1])),
            min(self.problem_count, other.problem_count),
        )

    def over_runs(self, level: float = LEVEL) -> Interval:
        """Return the t interval of the runs' means alone, as if there were no other problems: of pairs, or Welch's.

        Welch's degrees of freedom are rounded down.
        """
        total = float(np.sum([estimate for estimate, _ in self.runs]))
        weights = [float(estimate) / total if total else 1.0 for estimate, _ in self.runs]
        freedom = 1.0 / sum(weight**2 / each for weight, (_, each) in zip(weights, self.runs, strict=True))
        # A whole number may come out a little smaller.
        quantile = t_quantile(np.asarray(1.0 - level), max(1, int(freedom + 1e-9)))
        return _around(self.difference, quantile * np.sqrt(total))

    def p_value(self) -> Values:
        """Return 1 less the level at which the interval ends at zero, by bisection; at least 1e-12."""
        size = np.abs(self.difference)
        low, high = np.full(np.shape(size), np.log(_LEAST)), np.zeros(np.shape(size))
        for _ in range(48):
            middle = 0.5 * (low + high)
            excluded = size > self._half_width(np.exp(middle)) + _ROUNDING
            low, high = np.where(excluded, low, middle), np.where(excluded, middle, high)
        found: Values = np.exp(high)
        return found


def _around(difference: Values, half: Values) -> Interval:
    return Interval(float(difference - half), float(difference + half))


def crossed(before_RP: Values, after_RP: Values, *, paired: bool, sizes: Sequence[int] = ()) -> Crossed | None:
    """Compare two methods by their values of a metric [..., runs, problems], the same problems in both; after - before.

    `sizes` are the numbers of problems of several suites whose means are averaged; empty: one suite. With `paired` run
    r of both is of one seed. NaN stands for a problem that a run did not measure: it is filled by the run's and the
    problem's effects (Yates 1933), so that leaving out a hard problem favours no run. A run without any of a suite, and
    a problem that one side lacks, are left out; leading dimensions (many tables at once) allow no NaN.
    None where fewer than two runs a side or two problems of a suite remain.
    """
    suites = list(zip(by_suite(before_RP, sizes), by_suite(after_RP, sizes), strict=True))
    if before_RP.ndim == 2:
        suites = _known(suites, paired)
    counts = (suites[0][0].shape[-2], suites[0][1].shape[-2])
    problems = [before.shape[-1] for before, _ in suites]
    if min(counts) < 2 or min(problems) < 2:
        return None
    tables = [
        [_two_way(each) for each in ([after - before] if paired else [before, after])] for before, after in suites
    ]
    problem_SP = [sides[-1].problem_P - (0.0 if paired else sides[0].problem_P) for sides in tables]
    run_R = [np.mean([side.run_R for side in of_suites], axis=0) for of_suites in zip(*tables, strict=True)]
    return Crossed(
        np.mean([problem_P.mean(axis=-1) for problem_P in problem_SP], axis=0),
        tuple((each_R.var(axis=-1, ddof=1) / each_R.shape[-1], each_R.shape[-1] - 1) for each_R in run_R),
        _of_average([problem_P.var(axis=-1, ddof=1) / problem_P.shape[-1] for problem_P in problem_SP]),
        _of_average(
            [
                np.sum([side.residual / side.runs for side in sides], axis=0) / count
                for sides, count in zip(tables, problems, strict=True)
            ]
        ),
        counts,
        min(problems),
    )


def _of_average(variances: Sequence[Values]) -> Values:
    """Return the variance of the average of independent parts."""
    found: Values = np.sum(variances, axis=0) / len(variances) ** 2
    return found


def places_by_seed(seeds: Sequence[int | None], others: Sequence[int | None]) -> list[int] | None:
    """Return the places in `others` of each of `seeds`, to pair runs; None where they count as independent.

    That is where a seed is unknown or comes twice, where both sides have not the same ones, and where there are two:
    differences of two pairs are often equal by chance where problems are merely solved or not, and an estimate of zero
    from the runs would make the interval too narrow (up to 9 % of tables instead of 5 %).
    """
    known = None not in seeds and len(set(seeds)) == len(seeds) == len(others) and set(seeds) == set(others)
    return [others.index(seed) for seed in seeds] if known and len(seeds) != 2 else None


def _known(suites: Sequence[tuple[Values, Values]], paired: bool) -> list[tuple[Values, Values]]:
    """Leave out runs without a value of some suite, and problems that one side does not have."""
    if paired:
        # A pair's problem is known where both of its runs have it.
        suites = [(before + 0.0 * after, after + 0.0 * before) for before, after in suites]
    measured = [np.all([~np.isnan(pair[side]).all(axis=1) for pair in suites], axis=0) for side in (0, 1)]
    found = []
    for pair in suites:
        before_RP, after_RP = (values_RP[kept_R] for values_RP, kept_R in zip(pair, measured, strict=True))
        kept_P = ~(np.isnan(before_RP).all(axis=0) | np.isnan(after_RP).all(axis=0))
        found.append((before_RP[:, kept_P], after_RP[:, kept_P]))
    return found


@dataclass(frozen=True, slots=True)
class _TwoWay:
    """Means of the runs and of the problems, and the interaction's mean square."""

    run_R: Values
    problem_P: Values
    residual: Values
    runs: int


def _two_way(value_RP: Values) -> _TwoWay:
    missing_RP = np.isnan(value_RP)
    value_RP = _filled(value_RP, missing_RP)
    runs, problems = value_RP.shape[-2:]
    run_R, problem_P = value_RP.mean(axis=-1), value_RP.mean(axis=-2)
    rest_RP = value_RP - _additive(value_RP)
    freedom = (runs - 1) * (problems - 1) - int(missing_RP.sum())
    return _TwoWay(run_R, problem_P, (rest_RP**2).sum(axis=(-2, -1)) / max(freedom, 1), runs)


def _additive(value_RP: Values) -> Values:
    fitted: Values = (
        value_RP.mean(axis=-1, keepdims=True)
        + value_RP.mean(axis=-2, keepdims=True)
        - value_RP.mean(axis=(-2, -1), keepdims=True)
    )
    return fitted


def _filled(value_RP: Values, missing_RP: NDArray[np.bool_]) -> Values:
    """Fill missing values with those of the additive fit, which is repeated until they stay."""
    if not missing_RP.any():
        return value_RP
    value_RP = np.where(missing_RP, np.nanmean(value_RP), value_RP)
    for _ in range(1000):
        filled_RP = np.where(missing_RP, _additive(value_RP), value_RP)
        moved = np.abs(filled_RP - value_RP).max()
        value_RP = filled_RP
        if moved < _ROUNDING:
            break
    return value_RP


def bold(p_M: Sequence[float | None] | Values, level: float = LEVEL) -> NDArray[np.bool_]:
    """Tell the rows of a table whose intervals exclude zero after Holm's correction, by their p-values [..., rows].

    The smallest of m p-values is held against (1 - level) / m, the next against (1 - level) / (m - 1), until one is
    above. Rows with None have no crossed interval: they are not counted, and not bold.
    """
    return adjusted(p_M) <= 1.0 - level + _ROUNDING


def adjusted(p_M: Sequence[float | None] | Values) -> Values:
    """Return Holm's adjusted p-values [..., rows], to hold against 1 - level; NaN for a row with None."""
    found_M = np.asarray([np.nan if p is None else p for p in p_M] if not isinstance(p_M, np.ndarray) else p_M)
    # NaN is sorted last.
    order_M = np.argsort(found_M, axis=-1)
    rows = (~np.isnan(found_M)).sum(axis=-1, keepdims=True)
    times_M = np.maximum(rows - np.arange(found_M.shape[-1]), 1)
    sorted_M = np.minimum(1.0, times_M * np.take_along_axis(found_M, order_M, axis=-1))
    result_M = np.empty_like(found_M, dtype=np.float64)
    np.put_along_axis(result_M, order_M, np.fmax.accumulate(sorted_M, axis=-1), axis=-1)
    return np.where(np.isnan(found_M), np.nan, result_M)


def t_quantile(tail: Values, freedom: int) -> Values:
    """Return the t that a variable of Student's distribution exceeds in size with probability `tail`, 1e-13 to 1.

    Interpolated from `t_tail` on a grid: within 5e-6 of its size. Example: `t_quantile(0.05, 2)` is 4.3027.
    """
    log_tail_N, log_t_N = _quantiles(freedom)
    found: Values = np.exp(np.interp(np.log(tail), log_tail_N, log_t_N))
    return found


@lru_cache(maxsize=256)
def _quantiles(freedom: int) -> tuple[Values, Values]:
    """Logarithms of tails, rising, and of the t they belong to."""
    # Tails are at most those of the power law (1 + t^2 / freedom)^(-freedom / 2), up to a small factor.
    last = 0.5 * np.log(freedom * np.expm1(2.0 / freedom * 32.0))
    log_t_N = np.linspace(np.log(1e-4), last, 4096)
    log_tail_N = np.log(t_tail(np.exp(log_t_N), freedom))
    return log_tail_N[::-1], log_t_N[::-1]


def t_tail(t_N: Values, freedom: int) -> Values:
    """Return the probability that a variable of Student's distribution is larger in size than t > 0.

    It is I_x(freedom / 2, 1/2) at x = freedom / (freedom + t^2) (DLMF 8.17), accurate in small tails too.
    """
    x_N, rest_N = freedom / (freedom + t_N**2), t_N**2 / (freedom + t_N**2)
    a, b = 0.5 * freedom, 0.5
    # The continued fraction converges fast up to there; beyond it that of 1 - I does, with the roles changed.
    bound = (a + 1.0) / (a + b + 2.0)
    near_N = _beta_ratio(np.minimum(x_N, bound), a, b)
    far_N = 1.0 - _beta_ratio(np.minimum(rest_N, 1.0 - bound), b, a)
    return np.where(x_N <= bound, near_N, far_N)


def _beta_ratio(x_N: Values, a: float, b: float) -> Values:
    """The regularized incomplete beta function by its continued fraction (DLMF 8.17.22), by Lentz's method."""
    log_front_N = a * np.log(x_N) + b * np.log1p(-x_N) + lgamma(a + b) - lgamma(a) - lgamma(b) - np.log(a)
    c_N, d_N = np.ones_like(x_N), 1.0 / (1.0 - (a + b) / (a + 1.0) * x_N)
    ratio_N = d_N
    for m in range(1, 200):
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d_N = 1.0 / (1.0 + term * x_N * d_N)
            c_N = 1.0 + term * x_N / c_N
            ratio_N = ratio_N * c_N * d_N
        if np.all(np.abs(c_N * d_N - 1.0) < 1e-14):
            break
    found: Values = np.exp(log_front_N) * ratio_N
    return found
