"""`megasharp sweep`: a grid of runs, here or as a Slurm array, and its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common import output


def sweep(
    grid: Annotated[Path, typer.Argument(help="The sweep's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides of the sweep's keys.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs on this machine at the same time.")] = 1,
    slurm: Annotated[bool, typer.Option(help="Submit the runs as one Slurm array instead.")] = False,
    results: Annotated[bool, typer.Option(help="Run nothing: table, CSV and picture of what is finished.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --results: their folder; the sweep's own.")] = None,
    dry_run: Annotated[bool, typer.Option(help="List the runs, or print the array's file; start nothing.")] = False,
    runs: Annotated[Path, typer.Option(help="The folder that holds the sweep's folder of runs.")] = Path("runs"),
) -> None:
    """Run a grid of runs, each seed of each case, or go on with it; the same command resumes what is not finished."""
    from megasharp.trainer.sweep import Sweep

    whole = Sweep(grid, overrides or [], runs, typer.echo)
    if results:
        whole.tell(out)
    elif slurm:
        whole.submit(dry_run=dry_run)
    else:
        if not dry_run:
            output.outlive()
        whole.run(at_once, dry_run=dry_run)
