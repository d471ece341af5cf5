"""Comparison at equal pass@1: frontiers of pass@1 and pass@k, and a method's distance from the line a baseline draws.

A method that trains less keeps more of pass@k and has less pass@1, so a difference of pass@k at one learning rate says
little. The baseline's runs at several rates (or its evaluations while it trains) draw a line in the plane of both
metrics; a method is better than the baseline where it lies above that line.

The line is an upper concave hull. Every point of it can be reached: a mixture of two models, one for each problem
chosen by lot, has the mean of their pass@k for every k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.crossed import Crossed, crossed
from megasharp.evals.estimators import by_suite

# Float64, of the shape that the name's suffix or the docstring gives.
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MethodRuns:
    """A method's runs on the same problems: two metrics, [runs, problems] each, `x_RP` the one that is matched.

    `sizes` are the numbers of problems of several suites whose means are averaged; empty: one suite.
    """

    name: str
    x_RP: Values
    y_RP: Values
    sizes: tuple[int, ...] = ()

    @property
    def point(self) -> tuple[float, float]:
        """The means of both metrics over runs and problems."""
        return self._mean(self.x_RP), self._mean(self.y_RP)

    def scatter(self) -> Values:
        """Return the covariance of both metrics' means between runs, [2, 2]."""
        return np.cov(self.by_run(self.x_RP), self.by_run(self.y_RP))

    def by_run(self, values_RP: Values) -> Values:
        """Return each run's mean over problems, averaged over suites, [runs]."""
        means: Values = np.mean([part.mean(axis=1) for part in by_suite(values_RP, self.sizes)], axis=0)
        return means

    def _mean(self, values_RP: Values) -> float:
        return float(np.mean([part.mean() for part in by_suite(values_RP, self.sizes)]))


@dataclass(frozen=True, slots=True)
class Distance:
    """A method's vertical distance from a baseline's line, over runs and problems.

    `between` names the ends of the segment that holds the method's x, `weight` is that of the first, `slope` the
    segment's. With `beyond` x is larger than any of the line, and the distance is from the last segment's extension.
    """

    x: float
    between: tuple[str, str]
    weight: float
    slope: float
    beyond: bool
    crossed: Crossed


def upper_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the vertices of the upper concave hull of points (x, y), from the smallest x to the largest."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and hull[-1][0] == x:
            # Of points with one x the last is the highest.
            hull.pop()
        while len(hull) > 1 and _rise(hull[-2], hull[-1]) <= _rise(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _rise(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def area_above(
    points: Sequence[tuple[float, float]], baseline: Sequence[tuple[float, float]], start: tuple[float, float]
) -> float:
    """Return the area between the frontier of `points` and that of `baseline`, positive where the former is higher.

    Both frontiers begin at `start`, the model before training. The floor is the baseline's frontier at its largest x:
    below it, and beyond a frontier's largest x, a frontier counts as the floor. So this is the difference of two
    hypervolumes with the reference point (x of `start`, floor), and a method that trains less gains nothing by it.
    """
    own, other = (upper_hull([start, *(point for point in each if point[0] > start[0])]) for each in (points, baseline))
    floor = other[-1][1]
    return _volume(own, floor) - _volume(other, floor)


def _volume(hull: Sequence[tuple[float, float]], floor: float) -> float:
    """Integrate max(hull, floor) - floor."""
    total = 0.0
    for (x, y), (next_x, next_y) in pairwise(hull):
        first, second = y - floor, next_y - floor
        if first <= 0.0 and second <= 0.0:
            continue
        if first * second < 0.0:
            # The part of the segment above the floor is a triangle.
            total += 0.5 * max(first, second) ** 2 / (abs(first) + abs(second)) * (next_x - x)
        else:
            total += 0.5 * (first + second) * (next_x - x)
    return total


def distance(method: MethodRuns, baseline: Sequence[MethodRuns]) -> Distance | None:
    """Measure a method's vertical distance from the line of `baseline`, which may include the untrained model's runs.

    Run r of all of them is of one seed. On the segment from a to b that holds the method's x, of slope s, run r and
    problem p contribute the distance along the segment's normal

        d_rp = y_rp - w a_rp - (1 - w) b_rp - s (x_rp - w a'_rp - (1 - w) b'_rp)

    whose mean does not depend on w; its scatter does (delta method). w is that of the segment's nearest place in the
    Mahalanobis metric of the metrics' covariance between runs: matching x alone would choose a w that scatters where a
    segment is steep, and the intervals would miss 13 % of the time, not 5 % (test_frontier.py). Beyond the line its
    last segment is extended; a last vertex whose gain in x is within a standard error is no part of the line, because
    such a segment's slope is chance.
    None where the method's x is smaller than all of the line, or fewer than two runs or vertices are there.
    """
    if min(len(each.x_RP) for each in (method, *baseline)) < 2:
        return None
    sides = {each.point: each for each in baseline}
    line = _with_a_slope([sides[point] for point in upper_hull(list(sides))])
    x, y = method.point
    if len(line) < 2 or x < line[0].point[0]:
        return None
    a, b = next((ends for ends in pairwise(line) if x <= ends[1].point[0]), (line[-2], line[-1]))
    along = np.subtract(b.point, a.point)
    metric = np.linalg.pinv(np.mean([each.scatter() for each in (method, *baseline)], axis=0))
    weight = 1.0 - float(np.clip(np.subtract((x, y), a.point) @ metric @ along / (along @ metric @ along), 0.0, 1.0))
    slope = float(along[1] / along[0])
    x_RP, y_RP = (weight * one + (1.0 - weight) * other for one, other in ((a.x_RP, b.x_RP), (a.y_RP, b.y_RP)))
    found = crossed(y_RP + slope * (method.x_RP - x_RP), method.y_RP, paired=True, sizes=method.sizes)
    beyond = x > line[-1].point[0]
    return None if found is None else Distance(x, (a.name, b.name), weight, slope, beyond, found)


def _with_a_slope(line: list[MethodRuns]) -> list[MethodRuns]:
    """Leave out last vertices whose x is not a standard error, over pairs of runs, above that of the one before."""
    while len(line) > 2:
        gain_R = line[-1].by_run(line[-1].x_RP) - line[-2].by_run(line[-2].x_RP)
        if gain_R.mean() > gain_R.std(ddof=1) / np.sqrt(len(gain_R)):
            break
        line = line[:-1]
    return line
