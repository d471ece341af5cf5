"""The end of a command: a user's mistake, or a signal, becomes one line on standard error and an exit code."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from megasharp.common import output, signals
from megasharp.common.errors import RankDied, RunFailed, StageTimeout, TrainingStopped, UserError
from megasharp.common.terminal import guard_streams

# Takes a line for the user: `typer.echo`, `note`, or a test's `list.append`.
Say = Callable[[str], None]
_USUAL = gc.get_threshold()
_SELDOM = 200_000
# Errors of a write: the disk, a quota or a file is full, a terminal is gone.
_LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


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

    SIGTERM, by which Slurm and container runtimes end a job, Ctrl-C and a terminal's hang-up give 143, 130 and 129; a
    run that saved because its time was up gives 75. A reader that has gone (`| head`) ends a command quietly with 1,
    unless it called `output.outlive`.
    """
    output.fill_closed()
    guard_streams()
    # Their bars go back to the beginning of a line, which guarded streams write out.
    for library in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    try:
        with signals.handled():
            command()
    except BaseException as error:
        problem = _output_problem(error)
        if problem is not None:
            error = problem
        end = _end(error)
        if end is None:
            raise
        # Nobody may be there to read it.
        with suppress(OSError):
            sys.stderr.write(f"megasharp: {end[0]}\n")
        sys.exit(end[1])


def _output_problem(error: BaseException) -> UserError | None:
    """Write what is left of standard output; return an error where that or `error`, a write's, says that it is lost."""
    problem = error.strerror if isinstance(error, OSError) and error.errno in _LOST and not output.outlives() else None
    try:
        sys.stdout.flush()
    except OSError as late:
        # So that the interpreter does not try again at its end, and say so.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        os.dup2(sys.stdout.fileno(), 1)
        if isinstance(error, SystemExit) and not error.code:
            problem = late.strerror
    return None if problem is None else RunFailed(f"the output cannot be written: {problem}")


def note(line: str) -> None:
    """Say on standard error what a user should know, though nothing is wrong."""
    sys.stderr.write(f"megasharp: note: {line}\n")


def status(line: str) -> None:
    """Say on a terminal what takes a while now, before it begins; where standard error is no terminal, say nothing."""
    if sys.stderr.isatty():
        sys.stderr.write(f"megasharp: {line}\n")
        sys.stderr.flush()


def _end(error: BaseException) -> tuple[object, int] | None:
    """Return the error's one line and exit code; None for what is not ours to judge."""
    if isinstance(error, signals.TimeIsUp):
        return error, signals.AGAIN
    number = signals.arrived()
    if number is not None:
        # Whatever the error is, the signal was its cause.
        return error if isinstance(error, signals.Stopped) else signals.Stopped(number), 128 + number
    if isinstance(error, UserError | TrainingStopped | RankDied | StageTimeout):
        return error, error.exit_code if isinstance(error, UserError) else 1
    return None
