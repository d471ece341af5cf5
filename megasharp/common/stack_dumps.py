"""Stacks of a run's ranks, and the rank at fault when a run hangs.

A rank writes its process id and host to `rank_N.process` beside its log. On SIGUSR2 it writes the stacks of all its
threads to that log, from C code that needs neither the interpreter nor its lock. So a rank that writes none is stopped,
in the kernel, or gone; and of those that do write, the others wait for the one that is not in the collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

STACKS = signal.SIGUSR2
GONE = "gone"
_UNKNOWN = "unknown"
# Where a process's start stands in the kernel's line, counted from its state.
_START = 19
_POLL_S = 0.05
# A dump is complete when its file has not grown for so long.
_QUIET_S = 0.3
_BEGIN = "(most recent call first):"
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
# Where a rank's calls come from, and where it waits for its peers.
_OF_A_RANK = (
    "megasharp/learner/ranks/processes.py",
    "megasharp/cluster/ray_runtime/rank_actor.py",
    "ray/_private/worker.py",
)
_BETWEEN_CALLS = ("_request", "main_loop")
_COLLECTIVE = ("torch/distributed/", "megatron/core/pipeline_parallel/p2p_communication.py")
STOPPED = {"T": "is stopped (state T, as by SIGSTOP)", "t": "is stopped by a debugger (state t)"}
_STATES = {
    **STOPPED,
    "D": "waits in the kernel (state D), for a disk or a device",
    "Z": "has ended (state Z)",
    GONE: "has ended",
}


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process; `node` is Ray's name of its node, empty without Ray.

    `started` is when it began, in clock ticks since the machine's boot; 0 where the kernel does not say.
    """

    rank: int
    pid: int
    host: str
    node: str = ""
    started: int = 0

    @property
    def here(self) -> bool:
        """Return whether it is a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def where(self) -> str:
        """Name of the process in a report."""
        return f"process {self.pid} on {self.host}"

    def state(self) -> str:
        """Return the kernel's letter for it; `GONE` also where another process has its number by now."""
        return state_of(self.pid) if _start_of(self.pid) == self.started else GONE


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's answer: the kernel's letter for its state, and its stacks, empty where it wrote none."""

    rank: int
    where: str
    state: str
    stacks: str


def write_stacks_on_signal(rank: int, log: Path, node: str = "") -> None:
    """Answer SIGUSR2 in a rank whose standard error is its log, then write `rank_N.process`."""
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    record = log.with_suffix(".process")
    partial = record.with_suffix(".partial")
    pid = os.getpid()
    partial.write_text(json.dumps(asdict(RankProcess(rank, pid, socket.gethostname(), node, _start_of(pid)))) + "\n")
    partial.replace(record)


def read_process(log: Path) -> RankProcess | None:
    """Return the process that writes this log; None where none has registered yet."""
    try:
        return RankProcess(**json.loads(log.with_suffix(".process").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process of this machine, such as T for a stopped one."""
    fields = _fields(pid)
    if fields:
        return fields[0]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        pass
    return _UNKNOWN


def _start_of(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[_START]) if fields else 0


def _fields(pid: int) -> list[str]:
    """Return the kernel's line on a process, from its state on; empty where there is none."""
    try:
        # The name in parentheses may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def examine_all(processes: Sequence[tuple[RankProcess, Path]], limit_s: float) -> list[Report]:
    """Ask ranks of this machine for their stacks, all at once; return what they wrote within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    asked = [_ask(process, log) for process, log in processes]
    reports = []
    for (process, log), begin in zip(processes, asked, strict=True):
        stacks = "" if begin is None else _written(log, begin, deadline)
        reports.append(Report(process.rank, process.where, process.state(), stacks))
    return reports


def unreachable(process: RankProcess) -> Report:
    """Return the report of a rank whose machine does not answer."""
    return Report(process.rank, process.where, "unreachable", "")


def _ask(process: RankProcess, log: Path) -> int | None:
    """Send the signal; return where in the log the answer begins, None where there can be none."""
    if process.state() == GONE:
        return None
    try:
        begin = log.stat().st_size
        os.kill(process.pid, STACKS)
    except OSError:
        return None
    return begin


def _written(log: Path, begin: int, deadline: float) -> str:
    text, since = "", time.monotonic()
    while time.monotonic() < deadline:
        try:
            with log.open("rb") as file:
                file.seek(begin)
                now = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        if now != text:
            text, since = now, time.monotonic()
        elif _BEGIN in text and time.monotonic() - since > _QUIET_S:
            return text
        time.sleep(_POLL_S)
    return text if _BEGIN in text else ""


def end(processes: Sequence[RankProcess]) -> None:
    """Kill these processes of this machine, stopped ones too."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            if process.state() != GONE:
                os.kill(process.pid, signal.SIGKILL)


def at_fault(reports: Sequence[Report]) -> list[tuple[int, str]]:
    """Return the ranks that hold up the others, and why in a few words; empty where none stands out.

    First those that the kernel says do not run, or that write no stacks; then those that are not in a collective while
    others are; then those that work while others have nothing to do.
    """
    silent = [report for report in reports if not report.stacks or report.state in (*STOPPED, "Z", GONE)]
    if silent:
        return [(one.rank, _STATES.get(one.state) or f"writes no stacks (state {one.state})") for one in silent]
    doing = {report.rank: _doing(report.stacks) for report in reports}
    waiting = [rank for rank, what in doing.items() if what == "collective"]
    if waiting:
        reason = f"is not in the collective that rank {waiting[0]} waits in"
        late = {rank: what for rank, what in doing.items() if what != "collective"}
    else:
        reason = "is at work while others have nothing to do"
        late = {rank: what for rank, what in doing.items() if what != "idle"}
        if len(late) == len(doing):
            return []
    texts = {report.rank: report.stacks for report in reports}
    return [(rank, f"{reason} ({_place(texts[rank])})") for rank in late]


def _doing(stacks: str) -> str:
    """Return `collective`, `idle` (it waits for its next call) or `working`, of the thread that answers calls."""
    frames = _frames(stacks)
    if any(part in frame["file"] for frame in frames for part in _COLLECTIVE):
        return "collective"
    ours = next((frame for frame in frames if _of(frame, "megasharp/") or _of(frame, "ray/_private/")), None)
    return "idle" if ours is not None and ours["function"] in _BETWEEN_CALLS else "working"


def _of(frame: re.Match[str], path: str) -> bool:
    return path in frame["file"]


def _place(stacks: str) -> str:
    """Return the innermost frame, for one line."""
    frames = _frames(stacks)
    if not frames:
        return "no Python frame"
    return f"{Path(frames[0]['file']).name}:{frames[0]['line']} {frames[0]['function']}"


def _frames(stacks: str) -> list[re.Match[str]]:
    """Return frames, innermost first, of the thread that answers calls; of the last thread where none is known to."""
    threads = [list(_FRAME.finditer(block)) for block in stacks.split(_BEGIN)[1:]]
    of_a_rank = [frames for frames in threads if any(_of(frame, path) for frame in frames for path in _OF_A_RANK)]
    return (of_a_rank or threads or [[]])[-1]
