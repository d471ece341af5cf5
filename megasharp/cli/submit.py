"""`megasharp submit`: a run, or an evaluation, as a Slurm job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import Overrides, RunFile, RunsFolder
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import status

JOB = "The Slurm job"
PLACE = "Python and container on the nodes"
AGAIN = "Time limit and restarts"
EVALUATE = "Evaluate instead of training"


def submit(
    config: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(help="Print the sbatch file; submit nothing.", show_default=False)] = False,
    runs: RunsFolder = Path("runs"),
    doctor: Annotated[
        bool | None,
        typer.Option(help="Check the nodes before each attempt. Without it: only where the run has GPUs."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_NAME",
            help="Cluster profile with options of the job: a file, or a name in ~/.config/megasharp/profiles. Options "
            "given here count before it.",
            rich_help_panel=JOB,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes. Without it: cluster.nodes of the run file.", rich_help_panel=JOB),
    ] = None,
    cpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="CPUs to ask for on each node. Without it: whole nodes.", rich_help_panel=JOB),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", rich_help_panel=JOB)] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.", rich_help_panel=JOB)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Another option for sbatch, such as --qos=high; repeatable.", rich_help_panel=JOB),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Time limit of one attempt, as HH:MM:SS, D-HH:MM:SS or minutes. Without it: 24:00:00.",
            rich_help_panel=AGAIN,
        ),
    ] = None,
    lead: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Seconds before the time limit at which the run is asked to save and end. Without it: 600, or more "
            "where the plan says that ending a step and saving takes long; with --eval 60.",
            rich_help_panel=AGAIN,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU of the nodes, as for plan: h200, h100, b200, or its memory in MiB. Without it: h200.",
            rich_help_panel=JOB,
        ),
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Speed of the shared disk in GB/s, as for plan, by which the last save is predicted. Without it: 10.",
            rich_help_panel=AGAIN,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of times that the job may queue itself again. Without it: 20.",
            rich_help_panel=AGAIN,
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of times that a job restarts a run that failed. Without it: 3.", rich_help_panel=AGAIN
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", hidden=True, help="Refused: a job always resumes.")] = False,
    python: Annotated[
        str | None,
        typer.Option(
            help="Path of a Python with megasharp on the nodes. Without it: this Python, or python3 in a container.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    container: Annotated[
        str | None, typer.Option(help="Container image for pyxis. Without it: no container.", rich_help_panel=PLACE)
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(help="Folder to mount in the container, as /from:/to; repeatable.", rich_help_panel=PLACE),
    ] = None,
    suite: Annotated[str | None, typer.Option("--eval", help="Suite to evaluate on.", rich_help_panel=EVALUATE)] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="With --eval: checkpoint to evaluate. Without it: the newest.", rich_help_panel=EVALUATE),
    ] = None,
) -> None:
    """Submit a run to Slurm as a job that saves before its time limit and queues itself again."""
    if resume:
        raise UserError("--resume: a job continues from the newest checkpoint by itself; leave it out")
    status(f"loading PyTorch, then reading {config}")
    from megasharp.config.slurm import ClusterProfile, find_profile, load_profile
    from megasharp.trainer.submit import Asked, submit_run, with_given

    found = None if profile is None else find_profile(profile)
    given = {
        "time": time,
        "cpus_per_node": cpus_per_node,
        "lead": lead,
        "gpu": gpu,
        "disk": disk,
        "restarts": restarts,
        "retries": retries,
        "partition": partition,
        "account": account,
        "sbatch": sbatch,
        "python": python,
        "container": container,
        "mount": mount,
        "doctor": doctor,
    }
    asked = Asked(
        file=config,
        overrides=overrides or [],
        runs=runs,
        options=with_given(
            ClusterProfile() if found is None else load_profile(found),
            {name: value for name, value in given.items() if value is not None},
        ),
        profile=found,
        nodes=nodes,
        suite=suite,
        checkpoint=checkpoint,
    )
    submit_run(asked, dry_run=dry_run, say=typer.echo)
