"""Where each run's time went: seconds of every stage over the steps, and the whole accounted for."""

from __future__ import annotations

from megasharp.report.page.records import Points, Stages
from megasharp.report.page.sampling import ranges, rounded
from megasharp.runs.goodput import goodput
from megasharp.runs.history import RunHistory
from megasharp.runs.text import duration

MOST_COLUMNS = 60


def stages(number: int, run: RunHistory) -> Stages | None:
    """The stages of a run, the one that took longest first; None before its first step."""
    rows = list(run.stages.items())
    totals: dict[str, float] = {}
    for _, seconds in rows:
        for name, value in seconds.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals or not run.training:
        return None
    names = sorted(totals, key=lambda name: -totals[name])
    columns: Points = []
    for part in ranges(len(rows), MOST_COLUMNS):
        chosen = [rows[place] for place in part]
        means = [rounded(sum(seconds.get(name, 0.0) for _, seconds in chosen) / len(chosen), 4) for name in names]
        columns.append([float(chosen[0][0]), float(chosen[-1][0]), *means])
    return Stages(number, names, columns, _account(run))


def _account(run: RunHistory) -> list[list[str]]:
    spent = goodput(run)
    parts = {
        "wall time": spent.wall,
        "steps that count": spent.useful,
        "evaluations": spent.evaluation,
        "checkpoints": spent.checkpoint,
        "starts": spent.start,
        "repeated": spent.repeated,
        "rest": spent.rest,
    }
    share = [] if spent.share is None else [["goodput", f"{spent.share:.0%}"]]
    return [*share, *([name, duration(seconds)] for name, seconds in parts.items())]
