"""`megasharp sweep`: a grid of runs, here or as a Slurm array, and its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.common import output
from megasharp.common.exit_codes import status

START = "Start the runs"
RESULTS = "Results"
COST = "Cost"


def sweep(
    grid: Annotated[Path, typer.Argument(help="The sweep's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the sweep to override, such as slurm.nodes=2.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="List the runs, or print the sbatch file; start nothing.", show_default=False)
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder that holds the sweep's folder.")] = Path("runs"),
    at_once: Annotated[
        int, typer.Option(min=1, help="Number of runs at the same time on this machine.", rich_help_panel=START)
    ] = 1,
    slurm: Annotated[
        bool,
        typer.Option(help="Submit the runs as one Slurm array instead.", show_default=False, rich_help_panel=START),
    ] = False,
    results: Annotated[
        bool,
        typer.Option(
            help="Start nothing; write the table, CSV file and picture of the runs that have ended.",
            show_default=False,
            rich_help_panel=RESULTS,
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            help="Start nothing; print what each case costs by plan, in GPU-hours of slurm.gpu. Exit code 1: a run "
            "would not work.",
            show_default=False,
            rich_help_panel=COST,
        ),
    ] = False,
    response: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --plan: mean length of a response in tokens. Without it: half of the limit.",
            rich_help_panel=COST,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --results: folder for these files. Without it: the sweep's own.", rich_help_panel=RESULTS
        ),
    ] = None,
) -> None:
    """Run every case of a sweep with every seed; the same command resumes what has not ended."""
    status(f"loading PyTorch, then reading {grid}")
    from megasharp.trainer.sweep import Sweep

    whole = Sweep(grid, overrides or [], runs, typer.echo)
    if plan:
        if not whole.plan(response):
            raise typer.Exit(1)
    elif results:
        whole.tell(out)
    elif slurm:
        whole.submit(dry_run=dry_run)
    else:
        if not dry_run:
            output.outlive()
        whole.run(at_once, dry_run=dry_run)
