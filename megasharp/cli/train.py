"""`megasharp train`: start or resume a run, show it dry, or start it again after failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from megasharp.cli.options import Overrides, RunFile, RunsFolder
from megasharp.common import output
from megasharp.common.errors import NotAtHand, RunFailed, UserError, one_line
from megasharp.common.exit_codes import collect_as_usual, note, status
from megasharp.common.signals import save_heard

AGAIN = "Resume and restart"


# One step after the other of a command: what each way of starting ends with is read in one place.
# Time may run out before the run is there to hear of it.
@save_heard()
def train(
    config: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration and the layout; start nothing.", show_default=False)
    ] = False,
    runs: RunsFolder = Path("runs"),
    resume: Annotated[
        bool,
        typer.Option(
            help="Continue after the newest complete checkpoint, or start the run if there is none yet.",
            rich_help_panel=AGAIN,
            show_default=False,
        ),
    ] = False,
    start_over: Annotated[
        bool,
        typer.Option(
            help="Rename the run's old folder to NAME.before_DATE and start from step 1.",
            rich_help_panel=AGAIN,
            show_default=False,
        ),
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="With --resume: a key whose value may differ from the stored run's; repeatable.",
            rich_help_panel=AGAIN,
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0, help="Restart the run up to this many times after a failure, with --resume.", rich_help_panel=AGAIN
        ),
    ] = 0,
) -> None:
    """Train a model with RLVR, as a run file says."""
    if resume and start_over:
        raise UserError("--resume continues the run and --start-over starts it from step 1: give one of them")
    if allow_change and not resume and not retries:
        raise UserError("--allow-change is for a run that is continued: add --resume, or leave it out")
    if not dry_run:
        output.outlive()
        if retries:
            first = ["--resume"] * resume + ["--start-over"] * start_over
            raise typer.Exit(train_again(config, overrides or [], runs, first, allow_change or [], retries))
        from megasharp.trainer.early_ranks import expect_ranks

        expect_ranks(config, overrides or [])
    status(f"loading PyTorch, then reading {config}")
    from megasharp.checkpoint.run_folder import holds_no_run, refuse_existing
    from megasharp.config.core import dump_yaml
    from megasharp.config.run_config import load_run, run_tree
    from megasharp.trainer.early_checks import refuse_without_checkpoints
    from megasharp.trainer.plan import described_without
    from megasharp.trainer.resolve.devices import leave_gpus_alone
    from megasharp.trainer.resolve.resolved_run import check
    from megasharp.trainer.resolve.summary import describe
    from megasharp.trainer.resume import commits_of
    from megasharp.trainer.stored_config import resumed_config

    run = load_run(config, overrides or [])
    leave_gpus_alone(run)
    root = runs / run.name
    # What cannot be continued or begun is refused before anything is said of it. An unreadable folder is refused later,
    # by the run's own message.
    if not start_over and not dry_run:
        with suppress(OSError):
            (refuse_without_checkpoints if resume else refuse_existing)(root)
    if resume:
        run = resumed_config(root, run_tree(config, overrides or []), str(config), note)
    begun = resume and not holds_no_run(root)
    commits = commits_of(root, run) if begun else {}
    try:
        resolved = check(run, str(config), begun, commits, weights=not dry_run)
    except NotAtHand as absent:
        if not dry_run:
            raise
        typer.echo("\n".join([dump_yaml(run), *described_without(run, str(config), absent)]))
        return
    if dry_run:
        from megasharp.trainer.plan import limits_that_bite

        limits = [f"limit      {text}" for text in limits_that_bite(resolved.config, str(config))]
        typer.echo("\n".join([dump_yaml(resolved.config), describe(resolved), *limits]))
        return
    # After the dry run's end, because these import Megatron.
    typer.echo(describe(resolved))
    status("loading Megatron-core")
    from megasharp.metrics.clock import process_began
    from megasharp.trainer.run import train as run_training

    collect_as_usual()
    try:
        folder = run_training(
            resolved,
            runs / resolved.config.name,
            resume=resume,
            start_over=start_over,
            allowed=allow_change or [],
            say=typer.echo,
            began=process_began(),
        )
    except BrokenPipeError as error:
        # Typer takes it for a reader of the output that has gone, and would end without a word.
        raise RunFailed(f"a process that the run had started is gone: {one_line(error)}") from error
    typer.echo(f"run folder: {folder}")


def train_again(
    config: Path, overrides: Sequence[str], runs: Path, first: Sequence[str], allowed: Sequence[str], retries: int
) -> int:
    """Train in a child process, with up to `retries` restarts; return the last attempt's exit code.

    `first` are options of the first attempt alone: later ones resume what it has begun. This process stays as
    long as the run does, so it imports neither torch nor numpy.
    """
    from megasharp.common.supervisor import Supervisor
    from megasharp.common.watchdog import STAGE_TIMEOUT_S
    from megasharp.config.core import apply_overrides, find, read_tree

    tree = apply_overrides(read_tree(find(str(config))), overrides)
    safe = ["-P"] if sys.flags.safe_path else []
    command = [
        *(sys.executable, *safe, "-m", "megasharp.cli", "train", str(config), *overrides, "--runs", str(runs)),
        *(part for key in allowed for part in ("--allow-change", key)),
    ]
    guard = tree.get("guard")
    limit = guard.get("stage_timeout_s", STAGE_TIMEOUT_S) if isinstance(guard, dict) else STAGE_TIMEOUT_S
    # The file is not validated here: the child refuses a limit that is no number, and a run without a name.
    limit_s = limit if isinstance(limit, int | float) else None
    root = runs / str(tree.get("name"))
    return Supervisor(command, root, note, first, stopped_limit_s=limit_s).run(retries)
