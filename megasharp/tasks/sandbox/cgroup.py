"""A control group for each program, where this user may make them: what all of its processes take together has a limit.

The limits inside of a sandbox (`inside.py`) hold for one process, and its sixteen would have sixteen times as much. In
version 1 groups are made below this process's own one, in the hierarchies `memory` and `pids`. In version 2 a group
that has processes cannot hand controllers on, so they are made beside the own one, where its parent hands `memory` on
and the own one has no limit that they would leave. The same files are written in both, where they are there.

All are in one folder of the process that opened them, which holds a lock on it: the next start removes what a killed
one left, and a new worker removes what the killed worker before it left.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megasharp.common.exit_codes import note

_MOUNTED = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_PREFIX = "megasharp-"
# Each enters before it becomes what it is to start: bubblewrap has children before anybody else could move it.
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'
_PROBE_S = 30.0
_GONE_S = 2.0
_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class Group:
    """One program's group: a folder in each hierarchy; none where there are no groups."""

    folders: tuple[Path, ...]

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that is to run in this group."""
        return ("/bin/sh", "-c", _ENTER, "sh", *map(str, self.folders), "--") if self.folders else ()

    def ran_out(self) -> bool:
        """Return True where the kernel ended a process because all took too much memory together."""
        return any(
            line.split()[0] == "oom_kill" and int(line.split()[1]) > 0
            for folder in self.folders
            for name in ("memory.events", "memory.oom_control")
            if (folder / name).exists()
            for line in (folder / name).read_text(encoding="ascii").splitlines()
        )


@contextmanager
def group(folders: tuple[Path, ...], memory_mb: int, processes: int) -> Iterator[Group]:
    """Make a group below `folders`; its processes are killed at the end. Raises OSError where it cannot be made."""
    _remove_of_killed(folders, os.getpid())
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    made = Group(tuple(folder / name for folder in folders))
    try:
        for folder in made.folders:
            folder.mkdir()
            _limit(folder, memory_mb * 2**20, processes)
        yield made
    finally:
        for folder in made.folders:
            _remove(folder)


def _limit(folder: Path, memory: int, processes: int) -> None:
    for name, value in (
        ("memory.limit_in_bytes", memory),
        ("memory.memsw.limit_in_bytes", memory),
        ("memory.max", memory),
        ("memory.swap.max", 0),
        ("memory.oom.group", 1),
        ("pids.max", processes),
    ):
        if (folder / name).exists():
            (folder / name).write_text(str(value), encoding="ascii")


@cache
def own_folders() -> tuple[Path, ...]:
    """The folders in which this process makes groups; none where it may not. Says on standard error, once, which."""
    try:
        folders = open_folders(_places(_MOUNTED, _OWN.read_text(encoding="ascii")))
    except (OSError, subprocess.SubprocessError) as error:
        note(
            f"programs run without a cgroup ({error}): their limit on memory is for each process, not for all "
            "together, and does not count what the kernel keeps for them (empty files, say)"
        )
        return ()
    note("programs run in cgroups of their own: their limit on memory is for all processes together too")
    return folders


def _places(mounted: Path, own: str) -> tuple[Path, ...]:
    """The groups below which to make others, of the text of /proc/self/cgroup. Raises OSError where there are none."""
    paths = {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    if "memory" in paths:
        places = [mounted / name / paths[name] for name in ("memory", "pids") if name in paths]
        if (places[0] / "memory.use_hierarchy").read_text(encoding="ascii").strip() != "1":
            raise OSError(f"{places[0]} does not count what is below it")
        return tuple(places)
    group = mounted / paths.get("", "")
    if _hands_on_memory(group):
        return (group,)
    if group == mounted or not _hands_on_memory(group.parent):
        raise OSError(f"neither {group} nor its parent hands the controller memory on")
    if (group / "memory.max").read_text(encoding="ascii").strip() != "max":
        raise OSError(f"{group} has a limit on memory, which programs beside it would leave")
    return (group.parent,)


def _hands_on_memory(group: Path) -> bool:
    return "memory" in (group / "cgroup.subtree_control").read_text(encoding="ascii").split()


def open_folders(places: tuple[Path, ...]) -> tuple[Path, ...]:
    """Make a folder of this process below each place, until it ends. Raises OSError where no program can enter it."""
    folders = tuple(place / f"{_PREFIX}{secrets.token_hex(4)}" for place in places)
    try:
        for folder in folders:
            _remove_abandoned(folder.parent)
            folder.mkdir()
            _locked(folder)
            if (folder / "cgroup.subtree_control").exists():
                _hand_on(folder)
        with group(folders, memory_mb=64, processes=4) as tried:
            subprocess.run([*tried.prefix, "/bin/true"], check=True, capture_output=True, timeout=_PROBE_S)
    except BaseException:
        _close(folders, os.getpid())
        raise
    atexit.register(_close, folders, os.getpid())
    return folders


def _hand_on(folder: Path) -> None:
    """Give the controllers to groups below the folder: in version 2 they have only those that it hands on."""
    for name in (folder / "cgroup.controllers").read_text(encoding="ascii").split():
        if name in ("memory", "pids"):
            (folder / "cgroup.subtree_control").write_text(f"+{name}", encoding="ascii")


def _locked(folder: Path) -> int:
    """A descriptor that locks the folder until this process has ended."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = _locked(folder)
            try:
                _remove_all(folder)
            finally:
                os.close(lock)


def _close(folders: tuple[Path, ...], owner: int) -> None:
    """Remove all, unless this is a child that its owner forked."""
    for folder in folders if os.getpid() == owner else ():
        _remove_all(folder)


def _remove_all(folder: Path) -> None:
    for each in folder.glob("*/"):
        _remove(each)
    _remove(folder)


@cache
def _remove_of_killed(folders: tuple[Path, ...], _worker: int) -> None:
    """Remove groups whose makers are gone; once in each process that makes some."""
    for folder in folders:
        for each in folder.glob("*-*/"):
            if not Path("/proc", each.name.partition("-")[0]).exists():
                _remove(each)


def _remove(folder: Path) -> None:
    """End a group's processes and remove the group; one whose processes are slow to end stays for a later call."""
    deadline = time.monotonic() + _GONE_S
    while folder.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            folder.rmdir()
            return
        _kill(folder)
        time.sleep(_LOOK_S)


def _kill(folder: Path) -> None:
    with suppress(OSError):
        if (folder / "cgroup.kill").exists():
            (folder / "cgroup.kill").write_text("1", encoding="ascii")
            return
        for number in (folder / "cgroup.procs").read_text(encoding="ascii").split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
