"""The sandbox that programs run in: bubblewrap's, found to hold on this machine before anything is run in it.

Inside there is no network, no process but the program's own, and no file but a Python's, its libraries' and packages,
all read-only; /tmp, which is home, and /dev/shm are in memory and small. An ordinary user needs the kernel's leave to
make user namespaces. Root has two ways: it makes the other namespaces itself and becomes nobody inside, or, in a
container that is not to make them, a user namespace like everybody.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.tasks.sandbox.cgroup import own_folders
from megasharp.tasks.sandbox.programs import Clock, End, Ran, Sandbox, run
from megasharp.tasks.sandbox.seccomp import CLONE_NEWUSER, TIOCSTI, this_machine

if TYPE_CHECKING:
    from megasharp.config.data import SandboxKind

RISK = (
    "reward.sandbox=none: programs that the model writes run with this user's rights: they can read and delete its "
    "files, use its keys and the network, and leave processes behind; do this only where nothing is to lose, as in its "
    "own container"
)
_INSTEAD = "or set reward.sandbox=none, which runs what the model writes with this user's rights"
_SCRATCH_BYTES = 64 * 2**20
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_PROBE_S = 60.0
# It meets the limit on processes, sees no other process than its own kind, reaches nothing outside, and gets none of
# the calls that are denied. What it prints after the first line is a limit that this machine does not keep.
_PROBE = """
import ctypes, os, signal, socket, sys
assert len([name for name in os.listdir("/proc") if name.isdigit()]) < 5, "it sees other processes"
try:
    socket.create_connection(("192.0.2.1", 9), timeout=0.1)
except OSError as error:
    assert error.errno in (1, 101, 113), f"it has a network: {error}"
assert len(open("/proc/net/route").readlines()) <= 1, "it has a network"
for place in ("/", "/usr/lib", sys.base_prefix):
    assert not os.access(place, os.W_OK), f"it can write to {place}"
open("/tmp/file", "w").close()
for place in ("/proc/1/mem", "/proc/1/task/1/mem"):
    try:
        os.close(os.open(place, os.O_RDWR))
    except OSError:
        continue
    sys.exit("it can write into bubblewrap")
library = ctypes.CDLL(None, use_errno=True)
library.syscall.argtypes = [ctypes.c_long] * 7
for name, number, *arguments in DENIED:
    done = library.syscall(number, *arguments, *[0] * (6 - len(arguments)))
    if done == 0 and name == "clone":
        os._exit(0)
    assert (done, ctypes.get_errno()) == (-1, 1), f"the system call {name} is not denied"
assert all(os.statvfs(place).f_blocks * os.statvfs(place).f_frsize <= SCRATCH for place in ("/tmp", "/dev/shm")), (
    "its files in memory have no limit"
)
children = 0
try:
    while children < PROCESSES:
        if os.fork() == 0:
            signal.pause()
        children += 1
except BlockingIOError:
    print("holds")
else:
    sys.exit("it can start any number of processes")
try:
    bytearray(MEMORY)
except MemoryError:
    pass
else:
    print("memory")
"""
_NO_LIMIT_ON_MEMORY = (
    "this machine keeps no limit on a process's memory (RLIMIT_AS) and makes no cgroups: a program may take all of the "
    "machine's memory"
)


def open_sandbox(kind: SandboxKind) -> Sandbox:
    """A sandbox that was tried, with control groups where there may be some.

    Raises UserError, naming `reward.sandbox`, where this machine has none.
    """
    if kind == "none":
        return Sandbox((), _python(), _packages(), alone=False, groups=own_folders())
    program = shutil.which("bwrap")
    if program is None:
        raise UserError(
            "reward.sandbox: programs run in bubblewrap, which is not installed; install Debian's package bubblewrap, "
            + _INSTEAD
        )
    reasons = []
    for sandbox in _ways(program):
        ran = _probe(sandbox)
        if ran.printed.startswith(b"holds\n"):
            groups = own_folders()
            if b"memory" in ran.printed and not groups:
                _note_once(_NO_LIMIT_ON_MEMORY)
            return replace(sandbox, groups=groups)
        reasons.append(ran.complaint or f"it took more than {_PROBE_S:g} s")
    raise UserError(
        f"reward.sandbox: bubblewrap makes no sandbox that holds here ({'; '.join(dict.fromkeys(reasons))}); "
        f"allow this user to make namespaces, {_INSTEAD}"
    )


def _ways(program: str) -> Iterator[Sandbox]:
    machine = this_machine()
    if machine is None:
        raise UserError(f"reward.sandbox: no filter of system calls is known for {os.uname().machine}; {_INSTEAD[3:]}")
    inside = tuple(_inside())
    if os.getuid() == 0:
        capabilities = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        prefix = (program, *_NAMESPACES, *capabilities, *inside)
        yield Sandbox(prefix, _python(), _packages(), leave_root=True, machine=machine)
    # The last way is for a bubblewrap that is older than the option; there the filter alone denies namespaces.
    for more in (("--disable-userns",), ()):
        yield Sandbox(
            (program, "--unshare-user", *more, *_NAMESPACES, *inside), _python(), _packages(), machine=machine
        )


def _probe(sandbox: Sandbox) -> Ran:
    """Run the probe in a sandbox, which prints "holds" where it does, and has a complaint where not."""
    machine = sandbox.machine
    denied: list[tuple[str | int, ...]] = list(machine.denied().items()) if machine else []
    if machine:
        denied += [("clone", machine.clone, CLONE_NEWUSER), ("ioctl", machine.ioctl, 0, TIOCSTI)]
    given = {
        "DENIED": denied,
        "SCRATCH": _SCRATCH_BYTES,
        "PROCESSES": sandbox.limits.processes + 2,
        "MEMORY": sandbox.limits.memory_mb * 2**20,
    }
    source = "\n".join([*(f"{name} = {value!r}" for name, value in given.items()), _PROBE])
    job = {"kind": "script", "preamble": "", "source": source}
    ran = run(sandbox, job, b"", Clock(_PROBE_S, time.monotonic() + _PROBE_S))
    return ran if ran.end is End.EXITED and ran.code == 0 else replace(ran, printed=b"")


_note_once = cache(note)


def _inside() -> Iterator[str]:
    """bubblewrap's arguments for the file system inside."""
    yield from ("--die-with-parent", "--new-session", "--hostname", "sandbox")
    # Folders that bubblewrap makes by itself only their owner may enter.
    for folder in ("/usr", "/etc"):
        yield from ("--perms", "0755", "--dir", folder)
    for folder in _LIBRARIES:
        yield from _library(Path(folder))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    # This Python and its packages, where they are outside of the system's libraries.
    base = Path(sys.base_prefix)
    paths = [Path(_python())] if base == Path("/usr") else [base]
    paths += [Path(folder) for folder in _packages() if not Path(folder).is_relative_to(base)]
    for path in paths:
        if any(path.is_relative_to(folder) for folder in _LIBRARIES):
            continue
        for parent in reversed(path.parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind", str(path), str(path))
    yield from ("--proc", "/proc", "--dev", "/dev")
    # They have the names of all keys of the user's.
    for file in ("/proc/keys", "/proc/key-users"):
        if Path(file).exists():
            yield from ("--ro-bind", "/dev/null", file)
    # bubblewrap's own process has the caller's keyring and no filter, and an ordinary user's program could write into
    # its memory.
    yield from ("--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    for folder in ("/tmp", "/dev/shm"):
        yield from ("--perms", "1777", "--size", str(_SCRATCH_BYTES), "--tmpfs", folder)
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")


def _library(folder: Path) -> Iterator[str]:
    if folder.is_symlink():
        yield from ("--symlink", str(folder.readlink()), str(folder))
    elif folder.is_dir():
        yield from ("--ro-bind", str(folder), str(folder))


def _python() -> str:
    return os.path.realpath(sys.executable)


def _packages() -> tuple[str, ...]:
    """Folders of installed packages: checks of HumanEval+ import numpy, and so do programs."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(paths[name] for name in ("purelib", "platlib")))
