"""`megasharp runs`: one run on a screen, several side by side, a list."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megasharp.cli.options import RunsFolder
from megasharp.common.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

# Characters of a line of the list.
_WIDEST = 10_000
# Letters of a state in a list; `show` has all of it.
_STATE = 100

runs_app = typer.Typer(no_args_is_help=True, help="List, show and compare runs.")


@runs_app.command("show")
def show(
    run: Annotated[str, typer.Argument(help="Run, by name or folder.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Show where one run stands: progress, goodput, restarts, checkpoints, resets, trends, warnings."""
    from megasharp.metrics.console import SafeConsole

    show_run(run, runs, SafeConsole())


@runs_app.command("compare")
def compare(
    names: Annotated[list[str], typer.Argument(help="Two runs or more, by name or folder.")],
    runs: RunsFolder = Path("runs"),
    picture: Annotated[
        Path | None, typer.Option(help="PNG file for the curves. Without it: compare.png beside the first run.")
    ] = None,
) -> None:
    """Compare runs: keys that differ, figures at equal steps and at the end, curves in one picture."""
    from megasharp.metrics.console import SafeConsole

    typer.echo(f"picture: {compare_runs(names, runs, picture, SafeConsole())}")


@runs_app.command("list")
def list_command(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder, newest first."""
    from megasharp.metrics.console import SafeConsole

    list_runs(folder, SafeConsole())


def compare_runs(names: Sequence[str], runs: Path, picture: Path | None, console: Console) -> Path:
    """Print several runs side by side; return the picture's path, `compare.png` beside the first folder unless given.

    Raises UserError for less than two runs, one that does not exist, or one that is named twice.
    """
    from megasharp.common.files import write_like
    from megasharp.reporting.history import by_label, find_run, read_run
    from megasharp.reporting.show import figures, page

    if len(names) < 2:
        raise UserError("compare needs at least two runs")
    histories = by_label([read_run(find_run(name, runs)) for name in names], "compare")
    console.print(page(histories))
    # Matplotlib takes a second to load; the tables are on the screen by then.
    from megasharp.reporting.curves import plot_runs

    shown = list(histories.values())
    curves = {name: {label: run.series(name) for label, run in histories.items()} for name in figures(shown)}
    write_like(*(run.folder for run in shown))
    return plot_runs(curves, picture or shown[0].folder.resolve().parent / "compare.png")


def show_run(name: str, runs: Path, console: Console) -> None:
    """Print the screen of one run, or of one that waits for its job. Raises UserError where there is neither."""
    from megasharp.cluster.slurm.submitted import standings
    from megasharp.reporting.history import began, find_run, find_submitted, read_run
    from megasharp.reporting.show import screen, submitted_screen

    waiting = find_submitted(name, runs)
    if waiting is not None:
        console.print(submitted_screen(waiting, standings({waiting: 0.0})[waiting]))
        return
    history = read_run(find_run(name, runs))
    said = standings({history.folder: began(history)}) if history.may_be_queued else {}
    console.print(screen(history, said.get(history.folder)))


def list_runs(folder: Path, console: Console) -> None:
    """Print the runs in a folder, a line each, the one that was written last first. Raises UserError for no folder."""
    from rich.text import Text

    from megasharp.cluster.slurm.submitted import standings
    from megasharp.reporting.history import began, find_runs, submitted_only
    from megasharp.reporting.number_text import Columns, moment

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that holds run folders")
    found, problems = find_runs(folder)
    for line in problems:
        console.print(Text(f"! {line}"))
    waiting = submitted_only(folder)
    if not found and not waiting:
        console.print(Text(f"no runs in {folder}"))
        return
    # One question for all of them.
    said = standings({**dict.fromkeys(waiting, 0.0), **{run.folder: began(run) for run in found if run.may_be_queued}})
    table = Columns("run", "state", "step", "reward", "attempts", "last written", style="dim")
    for path, submitted in waiting.items():
        table.add_row(path.name, said[path], "-", "-", "0", moment(submitted))
    for run in found:
        rewards = run.series("reward/mean")
        reward = f"{rewards[-1][1]:.3f}" if rewards else "-"
        of = "" if run.steps is None else f" of {run.steps}"
        state = said.get(run.folder) or textwrap.shorten(run.state, _STATE, placeholder=" ...")
        table.add_row(run.name, state, f"{run.last_step}{of}", reward, str(len(run.attempts)), moment(run.written))
    # Never folded: a log's path in a state can be copied whole.
    console.width = max(
        console.width, console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    )
    console.print(table)
