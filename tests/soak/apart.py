"""A program in namespaces of its own: processes, network, shared memory, /tmp and a small disk.

What the program leaves behind is then seen exactly, because nothing else is in there with it; and nothing of it is left
on the machine. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megasharp.common.parent_death import ended_with_parent

DISK_MB = 1500
# The shell is the first process of the namespace: it collects orphans that end. Slurm resolves no name where 127.0.0.1
# is the only address (getaddrinfo's AI_ADDRCONFIG), so there is another one.
_INSIDE = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$1" /tmp
mount -t tmpfs -o size={size}m tmpfs "$2"
ip link set lo up
ip address add 192.0.2.1/32 dev lo
shift 2
"$@" &
wait $!
"""
_LISTENS = "0A"


def run_apart(command: Sequence[str], folder: Path) -> int:
    """Run the command with `folder`/disk as a disk of its own and `folder`/tmp as /tmp; return its exit code.

    What is written to the disk is gone afterwards; `folder` itself stays.
    """
    temporary, disk = folder / "tmp", folder / "disk"
    shutil.rmtree(temporary, ignore_errors=True)
    for path in (temporary, disk):
        path.mkdir(parents=True, exist_ok=True)
    namespaces = ["--pid", "--mount", "--ipc", "--net", "--uts", "--fork", "--mount-proc", "--kill-child"]
    inside = ["bash", "-c", _INSIDE.format(size=DISK_MB), "bash", str(temporary), str(disk)]
    # However this process ends, so does `unshare`, and with it all that is inside.
    ending = ended_with_parent()
    return subprocess.run(["unshare", *namespaces, *inside, *command], preexec_fn=ending, check=False).returncode


@dataclass(frozen=True)
class Left:
    """Remains of other processes in the namespaces of this one."""

    processes: list[str]
    shared_memory: list[str]
    listening: list[int]

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.listening)


def left() -> Left:
    """Look for processes, for files of shared memory and for ports, of TCP, that somebody listens on."""
    own = {1, os.getpid()}
    processes = []
    for one in psutil.process_iter():
        # One that ends meanwhile is not left; a zombie is, until the shell has collected it.
        with suppress(psutil.NoSuchProcess):
            if one.pid not in own:
                processes.append(f"{one.name()} ({one.status()})")
    shared = [str(path) for path in Path("/dev/shm").iterdir()]
    return Left(processes, shared, _ports())


def _ports() -> list[int]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == _LISTENS]
