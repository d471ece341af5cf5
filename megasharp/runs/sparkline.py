"""A series of numbers as one line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` from their lowest to their highest in at most `width` blocks, each the mean of its share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return BLOCKS[3] * count
    return "".join(BLOCKS[min(int((mean - low) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)
