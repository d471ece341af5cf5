"""Few cases in place of a product: every value of every axis meets every value of every other axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return all combinations that are allowed."""
    rows = itertools.product(*axes.values())
    return [case for row in rows if allowed(case := dict(zip(axes, row, strict=True)))]


def all_pairs(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return a small subset of `product` that has every pair of values found in it; the same one at each call."""
    left = {pair for case in product(axes, allowed) for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(product(axes, allowed), key=lambda case: len(left & _pairs(case)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(case.items(), 2))
