"""Keeping a page small: a few of many things, evenly chosen, and long curves as means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megasharp.report.page.records import Points

Item = TypeVar("Item")


def spread_out(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` (at least 2) of `items`, evenly chosen, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


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
