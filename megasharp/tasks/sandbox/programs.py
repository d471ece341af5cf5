"""Running a program that a model wrote, with limits on everything, to one of four ends.

Standard input, output and errors are files in memory: nothing has to read while the program writes, so that neither a
flood nor a silence blocks a process, and the limit on a file's size is the limit on output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megasharp.common import signals
from megasharp.tasks.sandbox import cgroup, inside
from megasharp.tasks.sandbox.seccomp import Machine, assemble

_MEGABYTE = 2**20
_INSIDE = Path(inside.__file__).read_text(encoding="utf-8")
# The exit code of a process that the kernel ended at its limit on seconds of computing: its own, or bubblewrap's.
_OUT_OF_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
_LAST_LINE = 200
_WAITING_SIGNALS = 1024
_LAST_WORDS_S = 2.0
# A group's limit is one process's memory, in which files in /tmp and /dev/shm count, and beside it input, output and
# errors (16 MB each), and some for bubblewrap and the interpreter.
_GROUP_MEMORY_MB = 3 * 16 + 32
# bubblewrap's two, and a shell before them; threads count, and the limit inside is the one that a program is to meet.
_GROUP_PROCESSES = 8


class End(StrEnum):
    """The end of a run: by an exit code, at the limit on time or on memory together, or before it could begin."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    INFRA = "infra"


@dataclass(frozen=True, slots=True)
class Limits:
    """A program's limits: seconds of computing, address space and output of one process, processes, open files."""

    cpu_s: int = 10
    memory_mb: int = 1024
    output_mb: int = 16
    processes: int = 16
    files: int = 64


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The way to start programs: `prefix` stands before the command of a Python.

    `leave_root`: it begins as root and becomes nobody before the program. `alone`: it has a process space of its own,
    where a limit on processes counts its own only. `machine`: the numbering of system calls, of which many are denied;
    with it a program has a session keyring of its own too. `groups`: folders for control groups, one of which each
    gets.
    """

    prefix: tuple[str, ...]
    python: str
    packages: tuple[str, ...]
    leave_root: bool = False
    alone: bool = True
    machine: Machine | None = None
    limits: Limits = Limits()
    groups: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of a run: `seconds` from when its program may begin, and none after `deadline` of time.monotonic().

    The time that a busy machine takes to start a sandbox is not the program's.
    """

    seconds: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a run. `code` and `printed` are of one that `EXITED`; `complaint` is the last line of its errors.

    Example: `Ran(End.EXITED, 1, b"", "ZeroDivisionError: division by zero")`.
    """

    end: End
    code: int = 0
    printed: bytes = b""
    complaint: str = ""


def run(sandbox: Sandbox, job: Mapping[str, object], given: bytes, clock: Clock) -> Ran:
    """Run one job with `given` on its standard input; where it cannot be started, the result's end is INFRA."""
    with ExitStack() as stack:
        reads, writes = stack.enter_context(_memory(given)), stack.enter_context(_memory())
        try:
            process = stack.enter_context(started(sandbox, job, reads, writes))
        except OSError as error:
            return Ran(End.INFRA, complaint=str(error))
        ran = process.wait(clock)
        return Ran(ran.end, ran.code, _content(writes), ran.complaint)


def run_pair(
    sandbox: Sandbox, server: Mapping[str, object], client: Mapping[str, object], clock: Clock
) -> tuple[Ran, Ran]:
    """Run two jobs, each with the other's output as its input, until the client has ended; then the server is ended."""
    with ExitStack() as stack:
        # With a copy of an end left open here neither would see that the other has ended.
        with ExitStack() as ends:
            answers, answer = _pipe(ends)
            questions, ask = _pipe(ends)
            try:
                serving = stack.enter_context(started(sandbox, server, questions, answer))
                asking = stack.enter_context(started(sandbox, client, answers, ask))
            except OSError as error:
                lost = Ran(End.INFRA, complaint=str(error))
                return lost, lost
        asked = asking.wait(clock)
        # A server that fails closes its pipe first and writes its error after that.
        failed = asked.end is End.EXITED and asked.code == inside.PROGRAM_FAILED
        return serving.wait(Clock(_LAST_WORDS_S if failed else 0.0, clock.deadline)), asked


class Process:
    """A started job."""

    def __init__(self, process: subprocess.Popen[bytes], group: cgroup.Group, ready: int, errors: int) -> None:
        self._process = process
        self._group = group
        self._ready = ready
        self._errors = errors

    def wait(self, clock: Clock) -> Ran:
        """Until it ends by itself, or is ended because its time is up."""
        ended = os.pidfd_open(self._process.pid)
        try:
            in_time = _readable([self._ready, ended], clock.deadline)
            if in_time:
                in_time = _readable([ended], min(clock.deadline, time.monotonic() + clock.seconds))
        finally:
            os.close(ended)
        self.kill()
        complaint = self.complaint()
        # The code inside writes a byte when the sandbox holds and the program may begin.
        if not os.read(self._ready, 1):
            return Ran(End.INFRA, complaint=complaint or "it did not start")
        if self._group.ran_out():
            return Ran(End.MEMORY, complaint=complaint)
        code = self._process.returncode
        if not in_time or code in _OUT_OF_CPU:
            return Ran(End.TIMEOUT, complaint=complaint)
        return Ran(End.EXITED, code, complaint=complaint)

    def begins(self, deadline: float) -> bool:
        """Wait until its program may begin; False where it ends before, or has not begun by then."""
        return _readable([self._ready], deadline) and bool(os.read(self._ready, 1))

    def ran_out(self) -> bool:
        """Return True where all of its processes together took too much memory."""
        return self._group.ran_out()

    def complaint(self) -> str:
        """Return the last line of its errors."""
        lines = _content(self._errors).decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LAST_LINE]

    def kill(self) -> None:
        """End it with its process group; where it has a process space of its own, everything in that ends too."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _readable(descriptors: list[int], deadline: float) -> bool:
    readable, _, _ = select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))
    return bool(readable)


@contextmanager
def started(sandbox: Sandbox, job: Mapping[str, object], reads: int, writes: int) -> Iterator[Process]:
    """A job on its way; it is ended at the latest at the end."""
    whole = {
        **job,
        "limits": _limits(sandbox),
        "leave_root": sandbox.leave_root,
        "lock": sandbox.machine and {"keyctl": sandbox.machine.keyctl, "instructions": assemble(sandbox.machine).hex()},
        "packages": sandbox.packages,
    }
    memory, processes = sandbox.limits.memory_mb + _GROUP_MEMORY_MB, sandbox.limits.processes + _GROUP_PROCESSES
    with ExitStack() as stack:
        group = stack.enter_context(cgroup.group(sandbox.groups, memory, processes))
        errors = stack.enter_context(_memory())
        given = stack.enter_context(_memory(json.dumps(whole).encode()))
        ready, say_ready = os.pipe()
        stack.callback(os.close, ready)
        python = (sandbox.python, "-P", "-s", "-B", "-X", "utf8", "-c", _INSIDE, str(given), str(say_ready))
        try:
            with signals.save_kept_from_children():
                process = subprocess.Popen(
                    [*group.prefix, *sandbox.prefix, *python],
                    stdin=reads,
                    stdout=writes,
                    stderr=errors,
                    pass_fds=[given, say_ready],
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
        finally:
            os.close(say_ready)
        begun = Process(process, group, ready, errors)
        stack.callback(begun.kill)
        yield begun


# Equal programs must get equal verdicts, so hashes are fixed; threads of a library would count as processes.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def _limits(sandbox: Sandbox) -> dict[str, tuple[int, int]]:
    limits = sandbox.limits
    memory, output = limits.memory_mb * _MEGABYTE, limits.output_mb * _MEGABYTE
    found = {
        "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_FSIZE": (output, output),
        "RLIMIT_NOFILE": (limits.files, limits.files),
        "RLIMIT_CORE": (0, 0),
    }
    if sandbox.alone:
        # Elsewhere they would count all processes of the user. Timers and signals that wait are memory of the kernel.
        found["RLIMIT_NPROC"] = (limits.processes, limits.processes)
        found["RLIMIT_SIGPENDING"] = (_WAITING_SIGNALS, _WAITING_SIGNALS)
    return found


@contextmanager
def _memory(content: bytes = b"") -> Iterator[int]:
    """A file in memory that is at its beginning."""
    descriptor = os.memfd_create("megasharp")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    """Return all of a file in memory, from its beginning on."""
    with open(os.dup(descriptor), "rb") as file:  # noqa: PTH123
        file.seek(0)
        return file.read()


def _pipe(stack: ExitStack) -> tuple[int, int]:
    """A pipe's two ends, which `stack` closes."""
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    return reads, writes
