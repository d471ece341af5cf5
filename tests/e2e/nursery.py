"""Commands forked from one process that has done their imports, which take longer than most of the runs themselves.

A child is `megasharp` from its first own line on: a session of its own, its arguments, its environment, its streams,
its folder, and the end of an interpreter. `Command.start` starts the real thing, imports included.

Run as a program, this file is that process: a request a line on standard input, an exit code a line on standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

# What commands import when they run; the first of them before any library reads its variables.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Nursery:
    """One process that forks commands, one at a time, until the `with` block ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        out: Path,
        error: Path,
        timeout_s: float,
        meanwhile: Callable[[int], object] | None = None,
        umask: int = 0o022,
    ) -> int:
        """The exit code of `megasharp` with `arguments` in `folder`; its streams go to two files.

        `meanwhile` is called with its process id while it runs.

        Raises TimeoutError, and ends the command and all of its session, after `timeout_s` seconds.
        """
        request = {
            "arguments": [*arguments],
            "folder": str(folder),
            "streams": [str(out), str(error)],
            "environment": {**os.environ, **_VARIABLES},
            "umask": umask,
        }
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(process.stdout.readline())
        if meanwhile is not None:
            meanwhile(pid)
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.stdout.readline()
            raise TimeoutError(f"megasharp {' '.join(arguments)} still ran after {timeout_s:g} s")
        return int(process.stdout.readline())

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, **_VARIABLES},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A buffer could hold the exit code already while the pipe is waited for.
                bufsize=0,
            )
        return self._process


def _forked() -> dict[str, object] | None:
    """In the children, the request to carry out; None in this process, when there are no more."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            request: dict[str, object] = json.loads(line)
            return request
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(arguments: list[str], folder: str, streams: list[str], environment: dict[str, str], umask: int) -> None:
    """Make this process what a shell would have started."""
    os.umask(umask)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    opened += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in streams]
    for number, descriptor in enumerate(opened):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["megasharp", *arguments]


def _main() -> None:
    # The last ones are imported by a run's first checkpoint and picture.
    for name in (
        "megasharp.reporting.page.serve",
        "megasharp.trainer.evaluation",
        "megasharp.trainer.run",
        "megasharp.learner.async_checkpoint",
        "megatron.core.dist_checkpointing.strategies.torch",
        "megasharp.reporting.curves",
        "megasharp.reporting.passk",
        "matplotlib.backends.backend_agg",
    ):
        importlib.import_module(name)
    from megasharp.cli.main import main

    request = _forked()
    if request is not None:
        _become(**request)  # type: ignore[arg-type]
        main()


if __name__ == "__main__":
    _main()
