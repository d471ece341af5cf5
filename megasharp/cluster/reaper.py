"""Ends a Ray of ours whose driver was killed: `python -m megasharp.cluster.reaper FOLDER`, its input from the driver.

Ray's servers end with the driver, but its agents go on for a minute, waiting for them. The driver writes the processes,
a line "pid start-time" each, and keeps the pipe open; when it closes, what is left of them is killed and the folder
removed. After a close in good order nothing is left.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil


def described(processes: Iterable[psutil.Process]) -> str:
    """The lines for these processes."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid} {process.create_time()!r}\n")
    return "".join(lines)


def main(folder: str) -> None:
    """Returns when the driver has gone and everything is ended."""
    # A terminal's interrupt is the driver's business; this outlives it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    for pid, started in (line.split() for line in lines):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            # A process id is given to others in time.
            if process.create_time() == float(started):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
