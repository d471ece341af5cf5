"""Where a run's time and memory go: seconds per stage, and the peak of resident memory."""

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

    Stages do not nest, so their seconds never count twice; what lies between them is the stage `other`. `before` are
    seconds by stage that had passed already. The stages `apart` are the run's and no step's: `take` leaves them out.
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
        """A stage whose seconds are told by `add`."""
        running, _ = self._present
        assert running == OTHER, f"stage {name} starts inside stage {running}"
        self._present = (name, self._now())
        try:
            yield
        finally:
            self._present = (OTHER, self._now())

    def present(self) -> tuple[str, float]:
        """The stage that runs now, `other` between two, and for how many seconds; other threads may ask."""
        name, since = self._present
        return name, self._now() - since

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere, since the last `take` and outside any `stage`."""
        if name not in self._names_apart:
            self._step[name] += seconds
            return
        self._apart[name] += seconds
        self._totals[name] += seconds
        # Else they would be the step's as `other`.
        self._step_start += seconds

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last `take` (or the start), `other` included, and begin a new step."""
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
        """Seconds of one of the stages `apart` since they were last taken (or the start)."""
        return self._apart.pop(name, 0.0)

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds per stage over all that was taken, and of the stages `apart` so far."""
        return dict(self._totals)


def process_began() -> float:
    """When this process began, in seconds since 1970; elsewhere than on Linux up to a second early."""
    try:
        since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_BEGAN])
    except OSError:
        return float(psutil.Process().create_time())
    # psutil adds the kernel's whole second of the boot to this.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def peak_rss_bytes() -> int:
    """This process's peak of resident memory plus the peaks of its live children, in bytes.

    Children's children count too. An upper bound on the peak of the sum: pages that processes share count in
    each, and peaks need not coincide. Children that have ended are not counted, so ask while the ranks live.
    Where the system tells no peaks of other processes (anything but Linux), a child counts with its present
    resident memory.
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
