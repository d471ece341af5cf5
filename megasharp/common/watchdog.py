"""The end of a run that hangs: a thread of the driver compares each stage's time with its budget.

When a stage exceeds its budget, the stacks of the driver and of all ranks go to `stacks.txt` in the attempt's logs, the
ranks are killed, and `StageTimeout` is raised in the main thread, in one line that names the rank at fault. Where the
main thread does not come back from C code, this thread ends the process with exit code 1, and the processes it started
end with it. Where C code keeps the interpreter's lock, no Python thread runs, this one included: then faulthandler's C
timer, which this thread sets again as long as it runs, ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from megasharp.common import output, signals
from megasharp.common.errors import StageTimeout, UserError, one_line
from megasharp.common.files import write_text
from megasharp.common.stack_dumps import RankProcess, Report, at_fault, end, examine_all, read_process, unreachable

STACKS_FILE = "stacks.txt"
# The default of `guard.stage_timeout_s`.
STAGE_TIMEOUT_S = 7200.0
_POLL_S = 0.25
_TIMER_S = 5.0
# Seconds for ranks to write their stacks; one that does not is at fault.
_ANSWER_S = 5.0
# On another node a process has to be started first.
_FAR_S = 60.0
# Limit of looking at everything: a shared disk may be what hangs.
_LOOK_S = 600.0
_NAMED = 4


_Found = TypeVar("_Found")
There = Callable[[str, float, Callable[..., Any], tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that a stage may take, None for no limit, and the key of the run file that says so."""

    seconds: float | None
    key: str


@dataclass(frozen=True, slots=True)
class Watched:
    """The watched parts of a run: the clock's present stage with its seconds, and the ranks by their logs.

    `ranks` is the number of ranks that are processes of their own. `there(node, seconds, function, arguments)` calls a
    function on a node of that name, for ranks that are not on this machine.
    """

    stage: Callable[[], tuple[str, float]]
    logs: Path
    ranks: int
    there: There | None = None

    def log(self, rank: int) -> Path:
        """A rank's log."""
        return self.logs / f"rank_{rank}.log"


class Watchdog:
    """A context manager whose body is watched: `named` stages by their own budgets, all others by one.

    `last_words` is called before the process ends without its main thread; `grace_s` is how long that may take to come
    back and to close what it opened.
    """

    def __init__(
        self,
        watched: Watched,
        others: Budget,
        named: Mapping[str, Budget],
        last_words: Callable[[StageTimeout], None] = lambda _: None,
        grace_s: float = 60.0,
    ) -> None:
        self._watched = watched
        self._others = others
        self._named = named
        self._last_words = last_words
        self._grace_s = grace_s
        self._over = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if any(budget.seconds is not None for budget in (self._others, *self._named.values())):
            self._stack.enter_context(signals.failures_heard())
            thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            thread.start()
            self._stack.callback(thread.join, self._grace_s)
            self._stack.callback(self._over.set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _watch(self) -> None:
        timer = 0.0
        while not self._over.wait(_POLL_S):
            stage, seconds = self._watched.stage()
            budget = self._named.get(stage, self._others)
            if budget.seconds is not None and seconds > budget.seconds:
                self._expired(f"stage {stage} has run for more than {budget.seconds:g} s ({budget.key})")
                break
            if time.monotonic() > timer:
                timer = time.monotonic() + _TIMER_S
                _set_timer(budget.seconds, self._grace_s)
        # Not where this thread raised: then the timer has to end a run that hangs.
        faulthandler.cancel_dump_traceback_later()

    def _expired(self, what: str) -> None:
        _set_timer(_LOOK_S, self._grace_s)
        found = [read_process(self._watched.log(rank)) for rank in range(self._watched.ranks)]
        processes = [process for process in found if process is not None]
        reports = self._reports(processes)
        missing = [rank for rank, process in enumerate(found) if process is None]
        line = f"{what}: {verdict(reports, missing)}"
        error = StageTimeout(f"{line}; {self._write(line, reports, missing)}")
        if self._over.is_set():
            return
        signals.fail(error)
        self._end(processes)
        signals.interrupt()
        if not self._over.wait(self._grace_s):
            self._last_words(error)
            sys.stderr.write(f"megasharp: {error}\n")
            sys.stderr.flush()
            os._exit(1)

    def _reports(self, processes: Sequence[RankProcess]) -> list[Report]:
        def examine(node: str | None, there: list[RankProcess]) -> list[Report]:
            pairs = [(process, self._watched.log(process.rank)) for process in there]
            if node is None:
                return examine_all(pairs, _ANSWER_S)
            found: list[Report] | None = self._on(node, examine_all, pairs, _ANSWER_S)
            return [unreachable(process) for process in there] if found is None else found

        reports = [report for found in _by_node(processes, examine) for report in found]
        return sorted(reports, key=lambda report: report.rank)

    def _end(self, processes: Sequence[RankProcess]) -> None:
        def end_there(node: str | None, there: list[RankProcess]) -> None:
            if node is None:
                end(there)
            else:
                self._on(node, end, there)

        _by_node(processes, end_there)

    def _on(self, node: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function on a node; return None where the node does not answer."""
        if self._watched.there is None:
            return None
        try:
            return self._watched.there(node, _FAR_S, function, arguments)
        except Exception as error:
            sys.stderr.write(f"megasharp: note: node {node} was not asked: {one_line(error)}\n")
            return None

    def _write(self, line: str, reports: Sequence[Report], missing: Sequence[int]) -> str:
        """Write `stacks.txt`; return where the stacks are, or why they could not be written."""
        path = self._watched.logs / STACKS_FILE
        try:
            write_text(path, sections(line, reports, missing))
        except UserError as error:
            return one_line(error)
        return f"stacks of all processes: {path}"


def _by_node(processes: Sequence[RankProcess], deed: Callable[[str | None, list[RankProcess]], _Found]) -> list[_Found]:
    """Call `deed` for the processes of each node, None for this machine, all nodes at once; return its results."""
    nodes: dict[str | None, list[RankProcess]] = {}
    for process in processes:
        nodes.setdefault(None if process.here else process.node, []).append(process)
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return list(pool.map(deed, nodes.keys(), nodes.values()))


def _set_timer(budget: float | None, grace: float) -> None:
    if budget is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        # Descriptor 2 of a run is its console.log: why it ended must be seen.
        seen = output.error_stream() or 2
        faulthandler.dump_traceback_later(budget + grace + _TIMER_S, exit=True, file=seen)


def verdict(reports: Sequence[Report], missing: Sequence[int]) -> str:
    """Name the ranks at fault and why, in a few words for one line."""
    faults = [*((rank, "has not started") for rank in missing), *at_fault(reports)]
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        return "; ".join(f"rank {rank} {why}" for rank, why in faults[:_NAMED]) + more
    return f"{'no rank stands out; ' if reports else ''}the driver is in {_drivers_place()}"


def _drivers_place() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no Python frame"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def sections(line: str, reports: Sequence[Report], missing: Sequence[int]) -> str:
    """Return the text of `stacks.txt`: the verdict, then a section for each process, the driver's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Every thread of the driver, the innermost frame last.
    stacks = "\n".join(
        f"Thread {names.get(number, number)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
    parts = [line, f"==== driver: process {os.getpid()} on {socket.gethostname()} ====\n{stacks}"]
    for report in reports:
        head = f"==== rank {report.rank}: {report.where}, state {report.state} ===="
        parts.append(f"{head}\n{report.stacks or 'It wrote no stacks.'}")
    parts += [f"==== rank {rank}: not started ====" for rank in missing]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
