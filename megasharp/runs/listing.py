"""The runs in a folder, a line each, the one that was touched last first."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from megasharp.checkpoint.run_folder import CONFIG_FILE
from megasharp.errors import UserError
from megasharp.runs.history import RunHistory, read_run
from megasharp.runs.text import Columns, moment


def find_runs(folder: Path) -> list[RunHistory]:
    """Every run directly below `folder`, the latest first; folders that do not read as runs are left out."""
    found = []
    for path in folder.glob(f"*/{CONFIG_FILE}"):
        try:
            found.append(read_run(path.parent))
        except UserError:
            continue
    return sorted(found, key=touched, reverse=True)


def touched(run: RunHistory) -> float:
    """When its last row was written, or its configuration where there is none."""
    times = [row.get("time") or 0.0 for row in run.rows]
    return max(times, default=(run.folder / CONFIG_FILE).stat().st_mtime)


def listing(folder: Path) -> RenderableType:
    """The table."""
    runs = find_runs(folder)
    if not runs:
        return Text(f"no runs in {folder}")
    table = Columns("run", "state", "step", "reward", "attempts", "last written", style="dim")
    for run in runs:
        rewards = run.series("reward/mean")
        reward = f"{rewards[-1][1]:.3f}" if rewards else "-"
        of = "" if run.steps is None else f" of {run.steps}"
        table.add_row(run.name, run.state, f"{run.last_step}{of}", reward, str(len(run.attempts)), moment(touched(run)))
    return table
