"""The time and memory that a run takes: seconds per stage, and the peak of resident memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

OTHER = "other"
# The field of /proc/PID/stat, counted from the process's state on, which follows its name.
_BEGAN = 19


class StageClock:
    """Adds up wall-clock seconds per stage, per step and over the run.

    Stages do not nest, so no second counts twice; the time between them is the stage `other`. `before` holds seconds
    by stage that have passed already. The stages `apart` belong to the run and to no step: `take` leaves them out.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        *,
        before: Mapping[str, float] | None = None,
        apart: Collection[str] = (),
    ) -> None:
        self._now = now
        self._names_apart = frozenset(apart)
        self._apart: defaultdict[str, float] = defaultdict(float)
        self._step: defaultdict[str, float] = defaultdict(float, before or {})
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._present = (OTHER, now())
        self._step_start = self._present[1] - sum(self._step.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the body's seconds, also when it raises."""
        with self.uncounted(name):
            start = self._now()
            try:
                yield
            finally:
                self.add(name, self._now() - start)

    @contextmanager
    def uncounted(self, name: str) -> Iterator[None]:
        """Enter a stage whose seconds the caller passes to `add`."""
        running, _ = self._present
        assert running == OTHER, f"stage {name} starts inside stage {running}"
        self._present = (name, self._now())
        try:
            yield
        finally:
            self._present = (OTHER, self._now())

    def present(self) -> tuple[str, float]:
        """Return the stage that runs now (`other` between two) and its seconds so far; safe from other threads."""
        name, since = self._present
        return name, self._now() - since

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere, since the last `take` and outside of any `stage`."""
        if name not in self._names_apart:
            self._step[name] += seconds
            return
        self._apart[name] += seconds
        self._totals[name] += seconds
        # Otherwise `take` would count them once more, as `other`.
        self._step_start += seconds

    def take(self) -> dict[str, float]:
        """Return seconds per stage since the last `take` (or the start), `other` included, and begin a new step."""
        now = self._now()
        taken = dict(self._step)
        # Seconds measured elsewhere may overlap, so the remainder could come out below zero.
        taken[OTHER] = max(0.0, now - self._step_start - sum(taken.values()))
        for name, seconds in taken.items():
            self._totals[name] += seconds
        self._step.clear()
        self._step_start = now
        return taken

    def take_apart(self, name: str) -> float:
        """Return the seconds of one of the stages `apart` since it was last taken (or the start)."""
        return self._apart.pop(name, 0.0)

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds per stage over all that was taken, and of the stages `apart` so far."""
        return dict(self._totals)


def process_began() -> float:
    """Return when this process began, in seconds since 1970; up to a second early where the system is not Linux."""
    try:
        since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_BEGAN])
    except OSError:
        return float(psutil.Process().create_time())
    # psutil knows the time of the boot in whole seconds only.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def peak_rss_bytes() -> int:
    """Return the peak of this process's resident memory plus the peaks of all its live descendants, in bytes.

    This is an upper bound on the peak of the sum: shared pages count in each process, and peaks need not coincide.
    Processes that have ended are not counted, so call it while the ranks live. Only Linux has the peak of another
    process; elsewhere its present resident memory counts.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return own + sum(_peak_of(child) for child in psutil.Process().children(recursive=True))


def _peak_of(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
