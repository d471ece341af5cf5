"""Restarts of a run after failures that another start may fix: `megasharp train --retries N`.

The parent is small and needs the standard library alone; each attempt is a child, which uses the memory and may hang.
Whatever kills the parent ends the child. A signal that asks the parent to end, or to save, is passed on to the child.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from megasharp.common import signals
from megasharp.common.exit_codes import Say
from megasharp.common.parent_death import ended_with_parent
from megasharp.common.stack_dumps import STOPPED, state_of

# Exit codes after which a run is not restarted: done, a user's mistake, saved as asked, ended by a signal.
_FINAL = frozenset({0, 2, signals.AGAIN, *(128 + number for number in signals.NUMBERS)})
_NO_CHECKPOINT = "no checkpoint"
_SAME_PLACE = 2
_POLL_S = 0.1
_LOOK_S = 1.0


class Supervisor:
    """Attempts of one run, whose folder is `root`, one after the other.

    `command` starts an attempt: the first with the options `first` after it, later ones with `--resume`; where `first`
    is not empty, only once one has opened the folder. `pause_s` is the time between two, in which the system frees what
    the earlier one held. `note` prints a line. A child that is stopped, as by SIGSTOP, for more than `stopped_limit_s`
    is killed and counts as failed; None: no limit.
    """

    def __init__(
        self,
        command: Sequence[str],
        root: Path,
        note: Say,
        first: Sequence[str] = (),
        pause_s: float = 2.0,
        stopped_limit_s: float | None = None,
    ) -> None:
        self._command = list(command)
        self._first = list(first)
        self._root = root
        self._note = note
        self._pause_s = pause_s
        self._stopped_limit_s = stopped_limit_s
        self._ended_here: str | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._arrived: list[signal.Signals] = []
        self._untold: deque[signal.Signals] = deque()

    def run(self, retries: int) -> int:
        """Run to an end that is final, or until `retries` restarts are used up; return the last attempt's exit code.

        A child that a signal ended counts as 128 + its number.
        """
        with self._signals():
            return self._run(retries)

    def _run(self, retries: int) -> int:
        begun: list[tuple[str, int]] = []
        opened = False
        while True:
            code = self._attempt(["--resume"] if begun and (opened or not self._first) else self._first)
            opened = opened or bool(self._record())
            failure = self._failure(code)
            code = code if code >= 0 else 128 - code
            if failure is None:
                return code
            if self._arrived:
                return self._ended()
            standing = self._standing()
            if len(begun) == retries:
                self._note(f"{failure}; {retries} restarts are all that were allowed, at {standing}")
                return code
            # An evaluation that was cut off goes on, which is progress too.
            place = (standing, sum(1 for _ in (self._root / "evals").rglob("*.parquet")))
            if begun.count(place) >= _SAME_PLACE:
                self._note(f"{failure}; given up: {_SAME_PLACE} restarts began at {standing} and made no progress")
                return code
            begun.append(place)
            self._note(f"{failure}; starts again at {standing} (restart {len(begun)} of {retries})")
            until = time.monotonic() + self._pause_s
            while time.monotonic() < until and not self._arrived:
                time.sleep(_POLL_S)
            if self._arrived:
                return self._ended()

    def _attempt(self, more: Sequence[str]) -> int:
        """Start the command and wait for it; return its exit code, or minus the number of the signal that ended it."""
        # USR1 waits until the run can hear it (`signals.save_heard`), and a terminal's Ctrl-C comes once, from here.
        with signals.save_kept_from_children():
            self._child = subprocess.Popen(
                [*self._command, *more],
                stdin=subprocess.DEVNULL,
                process_group=0,
                # This process has one thread, so running a function in the child is safe.
                preexec_fn=ended_with_parent(),  # noqa: PLW1509
            )
        self._tell()
        return self._end_of(self._child)

    def _end_of(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the child's exit code. One that is stopped for too long is killed: its watchdog does not run either.

        Only time in which this process runs counts: Slurm suspends a job with all its processes.
        """
        self._ended_here = None
        stopped_s = 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_LOOK_S)
            state = state_of(child.pid)
            stopped_s = stopped_s + _LOOK_S if state in STOPPED else 0.0
            if self._stopped_limit_s is not None and stopped_s > self._stopped_limit_s:
                self._ended_here = f"the driver {STOPPED[state]}, for more than {self._stopped_limit_s:g} s"
                child.kill()

    def _failure(self, code: int) -> str | None:
        """Return the failure in a few words; None after an end that is final."""
        number = code if code >= 0 else 128 - code
        record = self._record()
        if number in _FINAL or record.get("gave_up"):
            return None
        if self._ended_here is not None:
            return self._ended_here
        if code < 0:
            return f"the run was ended by {signal.Signals(-code).name}"
        return str(record.get("reason") or f"the run ended with exit code {code}")

    def _record(self) -> Mapping[str, Any]:
        """Return the last attempt's own record; empty where it wrote none."""
        paths = self._root.glob("logs/attempt_*/attempt.json")
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                record: Mapping[str, Any] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if self._child is not None and record.get("pid") == self._child.pid:
                return record
        return {}

    def _standing(self) -> str:
        """Return the name of the newest complete checkpoint."""
        try:
            return (self._root / "checkpoints" / "latest").read_text().strip() or _NO_CHECKPOINT
        except OSError:
            return _NO_CHECKPOINT

    def _ended(self) -> int:
        """Return the exit code where a signal came and the attempt had failed, or none was running."""
        ends = [number for number in self._arrived if number != signals.SAVE]
        if ends:
            return 128 + ends[0]
        self._note("SIGUSR1 came and the attempt failed, so nothing was saved; continue with --resume")
        return signals.AGAIN

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals inside. Where the process that started this one has blocked USR1, it is unblocked."""
        before = {number: signal.signal(number, self._handle) for number in (*signals.heard(), signals.SAVE)}
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signals.SAVE})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(signal.Signals(number))
        self._untold.append(signal.Signals(number))
        self._tell()

    def _tell(self) -> None:
        """Pass on the signals that have arrived, each once; a signal that comes in the middle does the same."""
        while self._child is not None and self._child.returncode is None and self._untold:
            with suppress(IndexError):
                self._child.send_signal(self._untold.popleft())
                # A stopped child would never receive it.
                self._child.send_signal(signal.SIGCONT)
