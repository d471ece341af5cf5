"""`megasharp plan`: memory and time of a run before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import Overrides
from megasharp.common.exit_codes import status

ASSUMED = "What the plan assumes"


def plan(
    config: Annotated[Path, typer.Argument(help="The run file; it need not be able to start on this machine.")],
    overrides: Overrides = None,
    suggest: Annotated[
        bool, typer.Option(help="Search layouts and print the best three, with reasons.", show_default=False)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Fill this many nodes: sets policy.dp and the engines.", rich_help_panel=ASSUMED),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="h200 (the default), h100, b200, or a GPU's memory in MiB.", rich_help_panel=ASSUMED),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Model FLOPs utilisation of updates and log-prob passes. Without it: 0.42 and 0.41.",
            rich_help_panel=ASSUMED,
        ),
    ] = None,
    response: Annotated[
        int | None,
        typer.Option(
            min=1, help="Mean length of a response in tokens. Without it: half of the limit.", rich_help_panel=ASSUMED
        ),
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Speed of the shared disk in GB/s, for all nodes together. Without it: 10.",
            rich_help_panel=ASSUMED,
        ),
    ] = None,
) -> None:
    """Estimate what a run needs of each GPU and how long a step takes. Exit code 1: it would not work."""
    status(f"loading PyTorch, then reading {config}")
    from megasharp.trainer.plan import ModelCheck

    with ModelCheck() as check:
        from megasharp.config.run_config import load_run
        from megasharp.trainer.plan import Options, plan_run

        run, options = load_run(config, overrides or []), Options(nodes, gpu, mfu, response, disk)
        answer = plan_run(run, str(config), options, check, as_json=as_json, suggestions=suggest)
    typer.echo(answer.text)
    if not answer.works:
        raise typer.Exit(1)
