"""Ends a Ray of ours whose driver was killed: `python -m megasharp.cluster.ray_runtime.reaper FOLDER`.

Its input is a pipe from the driver. Ray's servers end with the driver, but its agents go on for a minute, waiting for
them. The driver writes the processes, a line "pid start-time name" each, and keeps the pipe open; when it closes, those
that are left are killed and the folder is removed. Before a close in good order the driver writes a last line, and
nothing is left after it.

The other way round, a driver whose raylet is gone is ended by Ray's own code, without a message. So the message comes
from here, where a server ends while the pipe is open and that last line has not come. Ray's code does not always see
it: a driver that waited for engines during an evaluation went on waiting. After a minute it is killed from here.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil

CLOSING = "closing"
# Ray's own code needs some seconds at most, and a run that ends for a lost rank some more to close.
ALONE_S = 60.0
_SERVERS = ("raylet", "gcs_server")
_READ_BYTES = 1 << 16


def described(processes: Iterable[psutil.Process]) -> str:
    """Return the lines for these processes."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid} {process.create_time()!r} {process.name()}")
    return "\n".join(lines)


def main(folder: str, alone_s: float = ALONE_S) -> None:
    """Wait until the driver has gone, then end all that is left; it has `alone_s` seconds after the end of a server."""
    # A terminal's interrupt is the driver's business; this outlives it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    family, ended = _watch(sys.stdin.fileno(), alone_s)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    # Last, because nobody may be there to read it.
    if ended is not None:
        print(f"megasharp: Ray's {ended} ended, and with it this run; continue with --resume", file=sys.stderr)


def _watch(pipe: int, alone_s: float) -> tuple[list[psutil.Process], str | None]:
    """Watch until the pipe closes; return the processes it named, and the server that ended before, if one did."""
    family: list[psutil.Process] = []
    servers: dict[int, str] = {}
    ended: str | None = None
    rest = ""
    driver = psutil.Process(os.getppid())
    while True:
        ready, _, _ = select.select([pipe, *servers], [], [], None if ended is None else alone_s)
        if not ready:
            with suppress(psutil.NoSuchProcess):
                driver.kill()
        elif pipe in ready:
            text = os.read(pipe, _READ_BYTES).decode()
            if not text:
                return family, ended
            *lines, rest = (rest + text).split("\n")
            for line in filter(None, lines):
                if line == CLOSING:
                    ended = None
                    _unwatch(servers, list(servers))
                else:
                    _add(line, family, servers)
        elif ended is None and _alive(driver):
            ended = servers[ready[0]]
        _unwatch(servers, [watched for watched in servers if watched in ready])


def _unwatch(servers: dict[int, str], watched: Iterable[int]) -> None:
    for descriptor in watched:
        del servers[descriptor]
        os.close(descriptor)


def _alive(driver: psutil.Process) -> bool:
    # When its first thread has ended, the kernel kills the servers, which may be before the rest of the driver has gone
    # and the pipe closes.
    with suppress(psutil.NoSuchProcess):
        return driver.status() != psutil.STATUS_ZOMBIE
    return False


def _add(line: str, family: list[psutil.Process], servers: dict[int, str]) -> None:
    """Add the process of a line; a server also with what becomes readable when it ends."""
    pid, started, name = line.split(maxsplit=2)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(pid))
        # A process id is given to others in time.
        if process.create_time() == float(started):
            family.append(process)
            if name in _SERVERS:
                # Old kernels and some containers do not have it: then its end is not reported.
                with suppress(OSError):
                    servers[os.pidfd_open(int(pid))] = name


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
