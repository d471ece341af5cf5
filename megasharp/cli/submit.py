"""`megasharp submit`: a run, or an evaluation, as a Slurm job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import Overrides, RunFile, RunsFolder


def submit(
    config: RunFile,
    overrides: Overrides = None,
    time: Annotated[str, typer.Option(help="Time limit of one attempt: HH:MM:SS, D-HH:MM:SS or minutes.")] = "24:00:00",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; cluster.nodes of the run file.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="CPUs of a node; without it, whole nodes.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further option of sbatch, as --qos=high.")] = None,
    lead: Annotated[
        int | None, typer.Option(min=1, help="Ask to save and end so many seconds early; 600, with --eval 60.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often the job may queue itself again.")] = 20,
    retries: Annotated[int, typer.Option(min=0, help="How often a job starts a run that failed again.")] = 3,
    python: Annotated[str | None, typer.Option(help="Python with megasharp on the nodes; this one.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis; the nodes as they are.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="/from:/to, seen in the container.")] = None,
    suite: Annotated[str | None, typer.Option("--eval", help="Evaluate on this suite instead of training.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="With --eval: what to evaluate; the run's newest.")] = None,
    runs: RunsFolder = Path("runs"),
    doctor: Annotated[
        bool | None, typer.Option(help="Examine nodes before each attempt; where there are GPUs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the sbatch file; submit nothing.")] = False,
) -> None:
    """Submit a run to Slurm, which saves before its time limit and queues itself again, or an evaluation."""
    from megasharp.trainer.submit import Asked, submit_run

    asked = Asked(
        file=config,
        overrides=overrides or [],
        runs=runs,
        time=time,
        nodes=nodes,
        cpus_per_node=cpus_per_node,
        lead_s=lead,
        restarts=restarts,
        retries=retries,
        partition=partition,
        account=account,
        extra=sbatch or [],
        python=python,
        container=container,
        mounts=mount or [],
        suite=suite,
        checkpoint=checkpoint,
        doctor=doctor,
    )
    submit_run(asked, dry_run=dry_run, say=typer.echo)
