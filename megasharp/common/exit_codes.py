"""The end of a command: a user's mistake, or a signal, becomes one line on standard error and an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable

from megasharp.common import signals
from megasharp.common.errors import RankDied, StageTimeout, TrainingStopped, UserError
from megasharp.common.terminal import guard_streams

# Takes a line for the user: `typer.echo`, `note`, or a test's `list.append`.
Say = Callable[[str], None]
_USUAL = gc.get_threshold()
_SELDOM = 200_000


def collect_seldom() -> None:
    """Have Python look for unreachable cycles after 200,000 new objects instead of 700, and not at the process's end.

    Torch and transformers make a million objects when they are imported, which live as long as the process. Looking
    through them takes a quarter of a command's start, and as long again at its end.
    """
    gc.set_threshold(_SELDOM)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """End `collect_seldom` for a command that has its imports and holds tensors or goes on for long.

    The imports are not looked through again.
    """
    gc.freeze()
    gc.set_threshold(*_USUAL)


def run_command(command: Callable[[], object]) -> None:
    """Run a command to its end; errors become exit codes: 2 is a mistake of the user's, 1 a run that stopped or failed.

    SIGTERM, by which Slurm and container runtimes end a job, and Ctrl-C give 143 and 130; a run that saved because its
    time was up gives 75.
    """
    guard_streams()
    # Models and data are folders on disk: no command may reach for a hub unless the user says so.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with signals.handled():
            command()
    except BaseException as error:
        code = _exit_code(error)
        if code is None:
            raise
        sys.exit(code)


def note(line: str) -> None:
    """Say on standard error what a user should know, though nothing is wrong."""
    sys.stderr.write(f"megasharp: note: {line}\n")


def _exit_code(error: BaseException) -> int | None:
    """Write the error's one line and return its exit code; None for what is not ours to judge."""
    if isinstance(error, signals.TimeIsUp):
        sys.stderr.write(f"megasharp: {error}\n")
        return signals.AGAIN
    number = signals.arrived()
    if number is not None:
        # Whatever the error is, the signal was its cause.
        stopped = error if isinstance(error, signals.Stopped) else signals.Stopped(number)
        sys.stderr.write(f"megasharp: {stopped}\n")
        return 128 + number
    if isinstance(error, UserError | TrainingStopped | RankDied | StageTimeout):
        sys.stderr.write(f"megasharp: {error}\n")
        return error.exit_code if isinstance(error, UserError) else 1
    return None
