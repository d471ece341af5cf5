"""The best evaluation of a run: the metric that chooses it, and whether its checkpoint is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.common.control import BestFigure
from megasharp.config.core import Tree
from megasharp.metrics.writers import Row
from megasharp.reporting.history import Peak, find_peak, read_evaluations

# Without files of evaluations.
NOWHERE = Path("nowhere")
ROWS: list[Row] = [
    {"step": 0, "eval/dev/pass@1": 0.9, "eval/dev/pass@16": 0.99},
    {"step": 1, "reward/mean": 0.1},
    {"step": 10, "eval/dev/pass@1": 0.2, "eval/dev/pass@16": 0.7, "eval/other/pass@16": 0.1},
    {"step": 20, "eval/dev/pass@1": 0.4, "eval/dev/pass@16": 0.6},
    {"step": 30, "eval/dev/pass@1": 0.4, "eval/dev/pass@16": None},
    {"step": 40, "eval/dev/pass@1": 0.3, "eval/dev/pass@16": 0.5},
]
CONFIG: Tree = {"eval": {"suites": ["configs/task/dev.yaml", "other"], "k": [16, 1]}}


def peak_of(config: Tree, rows: list[Row], checkpoints: list[int]) -> Peak | None:
    return find_peak(config, read_evaluations(NOWHERE, rows), checkpoints, {})


def test_the_first_suites_smallest_k_chooses_where_nobody_else_does() -> None:
    """The model that training starts from does not count; of equal ones the first is the peak."""
    peak = peak_of(CONFIG, ROWS, [20, 30])
    assert peak is not None
    assert (peak.metric, peak.step, peak.value, peak.kept) == ("eval/dev/pass@1", 20, 0.4, True)
    assert (peak.last_step, peak.last_value, peak.last_kept) == (40, 0.3, False)
    assert peak.line == (
        "best pass@1 on dev: 0.400 after step 20 (checkpoint kept); last 0.300 after step 40 (no checkpoint); "
        "checkpoint.keep_best chooses the metric"
    )


def test_keep_best_chooses() -> None:
    peak = peak_of({**CONFIG, "checkpoint": {"keep_best": "eval/dev/pass@16"}}, ROWS, [])
    assert peak is not None
    assert (peak.step, peak.value, peak.kept, peak.chosen_by) == (10, 0.7, False, "checkpoint.keep_best")
    tree = peak.tree(read_evaluations(NOWHERE, ROWS))
    assert tree["figures"] == {"eval/dev/pass@1": 0.2, "eval/dev/pass@16": 0.7, "eval/other/pass@16": 0.1}
    assert tree["last_figures"] == {"eval/dev/pass@1": 0.3, "eval/dev/pass@16": 0.5}
    assert tree["metric"] == "eval/dev/pass@16"


@pytest.mark.parametrize("config", [{}, {"eval": None}, {"eval": {"suites": []}}, CONFIG])
def test_without_evaluations_there_is_no_peak(config: Tree) -> None:
    assert peak_of(config, ROWS[:2], []) is None


def test_a_figure_that_was_measured_again_counts_as_it_was_last() -> None:
    again: list[Row] = [*ROWS, {"step": 20, "eval/dev/pass@1": 0.1}]
    peak = peak_of(CONFIG, again, [])
    assert peak is not None and peak.step == 30
    assert read_evaluations(NOWHERE, again)[20] == {"eval/dev/pass@1": 0.1, "eval/dev/pass@16": 0.6}


def test_the_best_that_the_run_has_seen_counts_where_its_evaluation_is_not_among_those_given() -> None:
    """Of equal ones the evaluation that is there is the peak."""
    few: list[Row] = [ROWS[-1]]
    peak = find_peak(CONFIG, read_evaluations(NOWHERE, few), [], {"eval/dev/pass@1": BestFigure(0.4, 20)})
    assert peak is not None
    assert (peak.step, peak.value, peak.last_step, peak.last_value) == (20, 0.4, 40, 0.3)
    equal = find_peak(CONFIG, read_evaluations(NOWHERE, ROWS), [], {"eval/dev/pass@1": BestFigure(0.4, 30)})
    assert equal is not None and equal.step == 20
