"""Commands of this Python with a limit each: one that fails, hangs or runs out of memory leaves the others alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# In the environment of a command that tries its program on a CPU, and measures nothing.
REHEARSAL = "MEGASHARP_REHEARSAL"
# The exit code of a command that found nothing here to try, as automake's tests have it.
NOT_TRIED = 77
# A machine that was lent has a copy of the repository, and megasharp is not installed there.
sys.path.insert(0, str(REPOSITORY))

from megasharp.common.parent_death import ended_with_parent  # noqa: E402


@dataclass(frozen=True, slots=True)
class Check:
    """One command of this Python, by name; `limit_s` ends it. `variables` are added to its environment."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)


def ended(check: Check, log: Path, limit_s: float | None = None) -> tuple[str, float]:
    """Run a check, its output at the end of `log`; return how it ended and its seconds.

    "ok" is good, and "not tried" (`NOT_TRIED`) neither good nor bad.
    What it has started ends with it, and with this process, however that ends.
    """
    limit_s = check.limit_s if limit_s is None else min(limit_s, check.limit_s)
    places = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.monotonic()
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *check.command],
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": places, "PYTHONUNBUFFERED": "1", **check.variables},
            start_new_session=True,
            preexec_fn=ended_with_parent(),  # noqa: PLW1509
        )
        try:
            code = process.wait(limit_s)
            how = {0: "ok", NOT_TRIED: "not tried"}.get(code, f"exit {code}")
        except subprocess.TimeoutExpired:
            how = f"not done in {limit_s:.4g} s"
        finally:
            # With what it has started, which would keep the GPU.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return how, time.monotonic() - began


def tool(name: str, *arguments: str) -> tuple[str, ...]:
    """A script of this folder."""
    return (f"tools/{name}.py", *arguments)


def end_by_exception() -> None:
    """Let a signal that asks this process to end do so by an exception, so that the check under way is ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
