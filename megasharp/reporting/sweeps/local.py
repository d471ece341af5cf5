"""A sweep's runs on this machine: some at a time, each in a process of its own that continues where it stopped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megasharp.common.errors import RunFailed
from megasharp.common.parent_death import ended_with_parent

_POLL_S = 0.2
# A run that is asked to end closes its ranks and engines first.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Task:
    """A run: its name, the command that starts or continues it, and the file for its output."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(slots=True)
class _Running:
    tasks: dict[subprocess.Popen[bytes], tuple[Task, float]] = field(default_factory=dict)

    def start(self, task: Task) -> None:
        task.log.parent.mkdir(parents=True, exist_ok=True)
        with task.log.open("ab") as log:
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C reaches a run once, from here.
                process_group=0,
                preexec_fn=ended_with_parent(),  # noqa: PLW1509 - this process has one thread
            )
        self.tasks[process] = (task, time.monotonic())

    def ended(self) -> Iterator[tuple[Task, int, float]]:
        """Yield tasks that have ended, their exit codes and seconds."""
        for process in [process for process in self.tasks if process.poll() is not None]:
            task, began = self.tasks.pop(process)
            yield task, process.returncode, time.monotonic() - began

    def end(self) -> None:
        """Ask all processes to end, and wait."""
        for process in self.tasks:
            process.terminate()
        until = time.monotonic() + _END_S
        for process in self.tasks:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_all(tasks: Sequence[Task], at_once: int, done: Callable[[Task, int, float], None]) -> None:
    """Run `tasks` in order, `at_once` together; `done` gets each one's exit code and seconds.

    A run that fails stops no other. Raises RunFailed at the end if any failed.
    """
    waiting, failed = list(tasks), []
    with _all_ended() as running:
        while waiting or running.tasks:
            while waiting and len(running.tasks) < at_once:
                running.start(waiting.pop(0))
            time.sleep(_POLL_S)
            for task, code, seconds in running.ended():
                done(task, code, seconds)
                if code:
                    failed.append(task)
    if failed:
        first = failed[0]
        raise RunFailed(
            f"{len(failed)} of {len(tasks)} runs failed ({', '.join(task.name for task in failed)}); the first one's "
            f"last words: {last_line(first.log)}; the same command goes on with them"
        )


def last_line(log: Path) -> str:
    """Return the last line that a run printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


@contextmanager
def _all_ended() -> Iterator[_Running]:
    running = _Running()
    try:
        yield running
    finally:
        running.end()
