"""Reduced metrics as plain figures."""

from __future__ import annotations

from megasharp.common.records import Maximum, Mean
from megasharp.metrics.group_metrics import flatten


def test_means_divide_after_they_are_added_and_a_mean_of_nothing_is_left_out():
    metrics = {"a": Mean(1.0, 2.0) + Mean(5.0, 1.0), "b": Maximum(-3.0) + Maximum(-7.0), "c": Mean(0.0, 0.0)}
    assert flatten(metrics) == {"a": 2.0, "b": -3.0}
