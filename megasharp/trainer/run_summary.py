"""Closes a run: summary.json, pictures of pass@k and of the training curves, and a table for the user.

matplotlib is imported when the pictures are drawn; where it is not installed, a run ends without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from megasharp.checkpoint.attempts import read_attempts, seconds_of_all
from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.run_folder import RunFolder
from megasharp.common.control import ControlState
from megasharp.common.files import write_text
from megasharp.config.core import read_tree
from megasharp.evals.evaluate import WITH_MEMORY
from megasharp.evals.suites import Suite
from megasharp.metrics.clock import peak_rss_bytes
from megasharp.metrics.console import AFTER, BEFORE, RunSummary, SuiteChange, SuiteFigures, print_summary
from megasharp.metrics.writers import Row, rows_of, sampled_rows
from megasharp.reporting.history import (
    evaluated_steps,
    evaluation_figures,
    find_peak,
    peak_metric,
    suite_figures,
    with_files,
)
from megasharp.trainer.step_log import ENGINE_GAP, AttemptTotals

# Rows and evaluations in the picture of a long run: its panels are some hundred pixels wide.
_MOST_ROWS, _MOST_EVALUATIONS = 500, 100
# Metrics of the evaluations after a step.
_Read = Callable[[int], dict[str, float]]


def summarize_run(
    folder: RunFolder,
    suites: Sequence[Suite],
    control: ControlState,
    totals: AttemptTotals,
    *,
    first: int,
    last: int,
    stage_seconds: Mapping[str, float],
    say: Callable[[str], None],
) -> None:
    """Write and print what came of a run that ended after step `last`; this attempt began after step `first`.

    `totals` and `stage_seconds` are this attempt's. A long run ends as fast as a short one: evaluations come from their
    files, the best from `control`, and of metrics.jsonl only parts are read.
    """
    root, peak_rss = folder.root, peak_rss_bytes()
    # Of a step's evaluations each suite asks for its own, and the peak for the newest.
    read = cache(partial(_evaluation, root))
    changes = [_change(read, suite.name, last) for suite in suites]
    rows = sampled_rows(root, _MOST_ROWS)
    pictures = _draw(root, changes, rows, control, say)
    config = read_tree(root / "config.yaml")
    evaluated = _evaluations_of_peak(evaluated_steps(root), read, peak_metric(config)[0], control)
    peak = find_peak(config, evaluated, complete_steps(folder.checkpoints), control.best)
    summary = {
        "steps": last,
        # Of all attempts: what this process measured is only a part of a resumed run.
        "seconds": seconds_of_all(read_attempts(folder.logs.parent)),
        "peak_rss_bytes": peak_rss,
        "peak": peak.tree(evaluated) if peak else None,
        "last": next((row for row in reversed(rows) if "time/step" in row), {}),
        "pass_at_k": {c.suite: {name: e.pass_at_k for name, e in c.evaluations.items()} for c in changes},
        "distinct_correct": {c.suite: {name: e.distinct_correct for name, e in c.evaluations.items()} for c in changes},
    }
    write_text(root / "summary.json", json.dumps(summary, indent=1))
    print_summary(
        RunSummary(
            last - first,
            changes,
            stage_seconds,
            totals.tokens,
            peak_rss,
            padding=totals.mean("batch/padding"),
            imbalance=totals.mean("batch/imbalance"),
            engine_gap=totals.mean(ENGINE_GAP),
            largest_gap=totals.largest_gap,
            reward_errors=totals.mean("reward/errors"),
        )
    )
    if peak is not None:
        say(peak.line)
    for picture in pictures:
        say(f"picture: {picture}")


def _evaluation(root: Path, step: int) -> dict[str, float]:
    return with_files(root, step, evaluation_figures(rows_of(root, step)))


def _evaluations_of_peak(
    steps: Sequence[int], read: _Read, metric: str, control: ControlState
) -> dict[int, dict[str, float]]:
    """Read the evaluations that decide on the peak: the best one, where the run knows it, else all; and the last."""
    best = control.best.get(metric)
    newest = next((step for step in reversed(steps) if metric in read(step)), None)
    chosen = steps if best is None else [best.step] + ([] if newest is None else [newest])
    return {step: read(step) for step in chosen}


def _with_evaluations(root: Path, rows: Sequence[Row]) -> list[Row]:
    """Add the evaluations that the rows do not have, evenly chosen, as rows of their own."""
    evaluated = {row["step"] for row in rows if evaluation_figures([row])}
    missing = [step for step in evaluated_steps(root) if step not in evaluated]
    distance = -(-len(missing) // _MOST_EVALUATIONS) or 1
    added: list[Row] = [{"step": step, **with_files(root, step, {})} for step in missing[::-distance]]
    return sorted([*rows, *added], key=lambda row: row["step"] or 0)


def _draw(
    root: Path, changes: Sequence[SuiteChange], rows: Sequence[Row], control: ControlState, say: Callable[[str], None]
) -> list[Path]:
    """Draw one picture of each suite that was evaluated, and the curves; none, and a line, without matplotlib."""
    try:
        from megasharp.reporting.curves import events_of, plot_training
        from megasharp.reporting.passk import plot_pass_at_k
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        say("no pictures: matplotlib is not installed (pip install matplotlib; megasharp report draws them later)")
        return []
    pictures = []
    for change in changes:
        if change.evaluations:
            path = root / f"pass_at_k_{change.suite}.png"
            curves = {name: found.pass_at_k for name, found in change.evaluations.items()}
            distinct = {name: found.distinct_correct for name, found in change.evaluations.items()}
            pictures.append(plot_pass_at_k(curves, path, change.suite, distinct))
    pictures.append(plot_training(_with_evaluations(root, rows), root / "curves.png", events_of(control)))
    return pictures


def _change(read: _Read, suite: str, last: int) -> SuiteChange:
    """Read a suite's first and last evaluations back from disk: an earlier attempt may have made them."""
    places = {BEFORE: (suite, 0), AFTER: (suite, last), "with memory": (f"{suite}{WITH_MEMORY}", last)}
    found = {}
    for name, (measured, step) in places.items():
        pass_at_k, distinct = suite_figures(read(step), measured)
        if pass_at_k and distinct is not None:
            found[name] = SuiteFigures(pass_at_k, distinct)
    return SuiteChange(suite, found)
