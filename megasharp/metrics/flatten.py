"""Metrics that still know how to be reduced, turned into plain figures."""

from __future__ import annotations

from megasharp.types import Maximum, Metric, Metrics


def flatten(metrics: Metrics) -> dict[str, float]:
    """The value of every metric: a Mean's average, a Maximum's largest. A Mean over nothing has no value and no entry.

    Example: `flatten({"clipped": Mean(3.0, 12.0), "entropy/correct": Mean(0.0, 0.0)}) == {"clipped": 0.25}`.
    """
    return {name: float(metric.value) for name, metric in metrics.items() if _has_value(metric)}


def _has_value(metric: Metric) -> bool:
    return isinstance(metric, Maximum) or metric.weight > 0
