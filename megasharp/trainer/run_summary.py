"""Closes a run: summary.json, pictures of pass@k and of the training curves, and a table for the user.

Imports matplotlib, which takes a second that a run's first step need not wait for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megasharp.checkpoint.run_folder import RunFolder, read_attempts, seconds_of_all
from megasharp.checkpoint.store import complete_steps
from megasharp.common.files import write_text
from megasharp.config.core import read_tree
from megasharp.evals.evaluate import WITH_MEMORY
from megasharp.evals.suites import Suite
from megasharp.metrics.clock import peak_rss_bytes
from megasharp.metrics.console import AFTER, BEFORE, RunSummary, SuiteChange, SuiteFigures, print_summary
from megasharp.metrics.writers import read_metrics
from megasharp.reporting.curves import plot_training
from megasharp.reporting.history import evaluations, find_peak
from megasharp.reporting.passk import plot_pass_at_k


def summarize_run(
    folder: RunFolder,
    suites: Sequence[Suite],
    *,
    first: int,
    last: int,
    stage_seconds: Mapping[str, float],
    tokens: float,
    say: Callable[[str], None],
) -> None:
    """Write and print what came of a run that ended after step `last`; this attempt began after step `first`.

    `stage_seconds` and `tokens` (of responses) are this attempt's.
    """
    root, peak_rss = folder.root, peak_rss_bytes()
    changes = [_change(folder, suite.name, last) for suite in suites]
    # Of all attempts: what this process measured is only a part of a resumed run.
    rows = read_metrics(root)
    pictures = [*_draw_pass_at_k(root, changes), plot_training(rows, root / "curves.png")]
    peak = find_peak(read_tree(root / "config.yaml"), rows, complete_steps(folder.checkpoints))
    summary = {
        "steps": last,
        "seconds": seconds_of_all(read_attempts(folder.logs.parent)),
        "peak_rss_bytes": peak_rss,
        "peak": peak.tree(evaluations(rows)) if peak else None,
        "last": next((row for row in reversed(rows) if "time/step" in row), {}),
        "pass_at_k": {c.suite: {name: e.pass_at_k for name, e in c.evaluations.items()} for c in changes},
        "distinct_correct": {c.suite: {name: e.distinct_correct for name, e in c.evaluations.items()} for c in changes},
    }
    write_text(root / "summary.json", json.dumps(summary, indent=1))
    trained = [row for row in rows if (row["step"] or 0) > first]
    padding, imbalance = (_mean(trained, f"batch/{name}") for name in ("padding", "imbalance"))
    gaps = [gap for row in trained if (gap := row.get("policy/engine_gap")) is not None]
    mean_gap, largest_gap = _mean(trained, "policy/engine_gap"), max(gaps, default=None)
    print_summary(
        RunSummary(last - first, changes, stage_seconds, tokens, peak_rss, padding, imbalance, mean_gap, largest_gap)
    )
    if peak is not None:
        say(peak.line)
    for picture in pictures:
        say(f"picture: {picture}")


def _draw_pass_at_k(root: Path, changes: Sequence[SuiteChange]) -> list[Path]:
    """Draw one picture of each suite that was evaluated."""
    pictures = []
    for change in changes:
        if change.evaluations:
            path = root / f"pass_at_k_{change.suite}.png"
            curves = {name: found.pass_at_k for name, found in change.evaluations.items()}
            distinct = {name: found.distinct_correct for name, found in change.evaluations.items()}
            pictures.append(plot_pass_at_k(curves, path, change.suite, distinct))
    return pictures


def _change(folder: RunFolder, suite: str, last: int) -> SuiteChange:
    """Read a suite's first and last evaluations back from disk: an earlier attempt may have made them."""
    places = {BEFORE: (suite, 0), AFTER: (suite, last), "with memory": (f"{suite}{WITH_MEMORY}", last)}
    found = {}
    for name, (file, step) in places.items():
        path = folder.evals(step) / f"{file}.json"
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            pass_at_k = {int(k): value for k, value in stored["pass_at_k"].items()}
            found[name] = SuiteFigures(pass_at_k, stored["distinct_correct"])
    return SuiteChange(suite, found)


def _mean(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """Return the mean over the rows that have the metric."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return sum(values) / len(values) if values else None
