"""`megasharp plan`: memory and time of a run before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import Overrides


def plan(
    config: Annotated[Path, typer.Argument(help="The run's YAML file; it need not be able to start here.")],
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Fill so many nodes: sets dp and the engines.")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200 (default), h100, b200, or a GPU's memory in MiB.")] = None,
    mfu: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Model FLOPs utilisation; 0.40.")] = None,
    response: Annotated[int | None, typer.Option(min=1, help="Mean response in tokens; half of the limit.")] = None,
    disk: Annotated[float | None, typer.Option(min=0.001, help="GB/s of the shared disk, in all; 10.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON.")] = False,
    suggest: Annotated[bool, typer.Option(help="Search layouts; print the best three with reasons.")] = False,
) -> None:
    """Say what a run needs of each GPU and how long a step takes. Exit code 1: it would not work."""
    from megasharp.trainer.plan import ModelCheck

    with ModelCheck() as check:
        from megasharp.config.run_config import load_run
        from megasharp.trainer.plan import Options, plan_run

        run, options = load_run(config, overrides or []), Options(nodes, gpu, mfu, response, disk)
        answer = plan_run(run, str(config), options, check, as_json=as_json, suggestions=suggest)
    typer.echo(answer.text)
    if not answer.works:
        raise typer.Exit(1)
