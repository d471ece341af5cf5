"""Metrics that still know how to be reduced, turned into plain figures."""

from __future__ import annotations

from megasharp.types import Metrics


def flatten(metrics: Metrics) -> dict[str, float]:
    """The value of every metric: a Mean's average, a Maximum's largest.

    Example: `flatten({"policy/clipped": Mean(3.0, 12.0)}) == {"policy/clipped": 0.25}`.
    """
    return {name: float(metric.value) for name, metric in metrics.items()}
