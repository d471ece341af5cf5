"""Keeping a page small: a few of many things, evenly chosen, and long curves as means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megasharp.report.page.records import Points

Item = TypeVar("Item")


def spread_out(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` (at least 2) of `items`, at equal distances, and the last.

    The distance is a power of two: when items are added, those that were chosen stay chosen or are halved.
    """
    distance = 1
    while len(chosen := [*range(0, len(items) - 1, distance), len(items) - 1]) > most:
        distance *= 2
    return [items[place] for place in chosen] if items else []


def thinned(points: Sequence[tuple[float, float]], most: int) -> Points:
    """At most `most` points: means over runs of neighbours of one length, x and y alike, the last run maybe shorter."""
    width = -(-len(points) // most) if points else 1
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [[_mean([x for x, _ in part]), _mean([y for _, y in part])] for part in parts]


def ranges(count: int, most: int) -> list[range]:
    """`count` places as at most `most` ranges of one length, the last maybe shorter."""
    width = max(1, -(-count // most))
    return [range(start, min(start + width, count)) for start in range(0, count, width)]


def rounded(value: float, digits: int = 5) -> float:
    """To so many significant digits."""
    return float(f"{value:.{digits}g}")


def _mean(values: Sequence[float]) -> float:
    return rounded(sum(values) / len(values), 6)
