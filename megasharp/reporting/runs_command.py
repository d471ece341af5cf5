"""`megasharp runs`: which folders are meant, and what is printed and drawn of them.

The runs in a folder, a line each, the one that was touched last first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from megasharp.checkpoint.run_folder import CONFIG_FILE
from megasharp.common.errors import UserError
from megasharp.reporting.history import RunHistory, read_run
from megasharp.reporting.number_text import Columns, moment
from megasharp.reporting.show import figures, page, screen


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


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run that is given by its path, or by its name in `runs`. Raises UserError where there is none."""
    for folder in (Path(name), runs / name):
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise UserError(f"no run {name!r}: neither {name} nor {runs / name} holds a {CONFIG_FILE}; see megasharp runs list")


def show(name: str, runs: Path, console: Console) -> None:
    """One run on one screen."""
    console.print(screen(read_run(find_run(name, runs))))


def compare(names: Sequence[str], runs: Path, picture: Path | None, console: Console) -> Path:
    """Several runs side by side; returns the picture's path: `compare.png` beside the first folder unless given."""
    # Imported here because matplotlib costs a second that `show` need not wait.
    from megasharp.reporting.curves import plot_runs

    if len(names) < 2:
        raise UserError("compare needs at least two runs")
    histories = told_apart([read_run(find_run(name, runs)) for name in names])
    console.print(page(histories))
    shown = list(histories.values())
    curves = {name: {label: run.series(name) for label, run in histories.items()} for name in figures(shown)}
    return plot_runs(curves, picture or shown[0].folder.resolve().parent / "compare.png")


def told_apart(histories: Sequence[RunHistory], command: str = "compare") -> dict[str, RunHistory]:
    """The runs by their names, or by their folders where two have the same. Raises UserError for one named twice."""
    if len({run.folder.resolve() for run in histories}) < len(histories):
        raise UserError(f"{command}: the same run is named twice")
    same = len({run.name for run in histories}) < len(histories)
    return {str(run.folder) if same else run.name: run for run in histories}


def show_list(folder: Path, console: Console) -> None:
    """The runs in a folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that holds run folders")
    console.print(listing(folder))
