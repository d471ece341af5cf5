"""The record of each start of a run, `logs/attempt_K/attempt.json`, from which goodput and restarts are counted.

It is written at the start, kept up to date while the attempt trains, and completed at its end. A process that was
killed leaves a record without an end, whose `seen` is when it was last known to be alive.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megasharp.common import signals
from megasharp.common.errors import RankDied, StageTimeout, TrainingStopped, UserError, one_line
from megasharp.common.files import write_text
from megasharp.common.section import Section

ATTEMPT_FILE = "attempt.json"
# The reason of an attempt that came to the run's end.
FINISHED = "finished"
# Seconds between two writes of the record: each is flushed to the disk, and training must not wait for that.
_BETWEEN_RECORDS = 5.0


class AttemptRecord(Section):
    """One start of a run; times in seconds since 1970, `seconds` by stage as the run's clock names them.

    `from_step` is the step of the checkpoint it continued from (0: the beginning), `first_step` and `last_step` the
    steps it finished, null before the first. `ended`, `reason` and `exit_code` are null while an attempt runs, and
    stay so where it was killed. `gave_up`: the run ended itself, and would again. `saved_step` is the step of the last
    checkpoint that it completed, 0 before the first, null in records of before 2026-11-24. `attention` names the
    kernels that the ranks took, null before they did and in records of before 2026-11-26.
    """

    started: float
    seen: float
    ended: float | None = None
    reason: str | None = None
    exit_code: int | None = None
    gave_up: bool = False
    from_step: int = 0
    saved_step: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    seconds: dict[str, float] = {}
    host: str = ""
    pid: int = 0
    slurm_job_id: str | None = None
    slurm_restart_count: int | None = None
    attention: str | None = None


class AttemptLog:
    """Keeps the record of the attempt whose logs are in `folder`; a context manager, whose body is the attempt.

    `began` is when its command started, in seconds since 1970: imports and checks are the attempt's time too. A record
    that cannot be written is left out, because the run itself reports a full disk.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time, *, began: float | None = None) -> None:
        self._path = folder / ATTEMPT_FILE
        self._now = now
        self._written = now()
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        self.record = AttemptRecord(
            started=self._written if began is None else began,
            seen=self._written,
            saved_step=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            slurm_job_id=os.environ.get("SLURM_JOB_ID"),
            slurm_restart_count=int(restarts) if restarts.isdecimal() else None,
        )
        self._write()

    @property
    def age(self) -> float:
        """Seconds since the attempt's start."""
        return self._now() - self.record.started

    def attends(self, kernels: str) -> None:
        """Record the kernels of attention."""
        self._change(attention=kernels)
        self._write()

    def resumed(self, step: int) -> None:
        """Record that the attempt continues after the checkpoint of `step`."""
        self._change(from_step=step)
        self._write()

    def saved(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete: without it the run must not be continued."""
        self._change(saved_step=step)
        self._write()

    def finished(self, step: int, seconds: Mapping[str, float]) -> None:
        """Record that `step` is done; `seconds` by stage since the attempt's start."""
        first = step if self.record.first_step is None else self.record.first_step
        self._change(first_step=first, last_step=step, seconds=dict(seconds))
        if self.record.seen - self._written >= _BETWEEN_RECORDS:
            self._write()

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Record seconds by stage since the attempt's start, with those after the last step."""
        self._change(seconds=dict(seconds))
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Record that the attempt is over, by this error or by none."""
        reason, code = how_it_ended(error)
        gave_up = isinstance(error, TrainingStopped)
        self._change(ended=self._now(), reason=reason, exit_code=code, gave_up=gave_up)
        self._write()

    def _change(self, **values: object) -> None:
        self.record = self.record.model_copy(update={"seen": self._now(), **values})

    def _write(self) -> None:
        self._written = self.record.seen
        with suppress(UserError, OSError):
            write_text(self._path, self.record.model_dump_json(indent=1))


def how_it_ended(error: BaseException | None) -> tuple[str, int]:
    """Return the reason in a few words, and the exit code that the command has for it."""
    number = signals.arrived()
    if number is not None:
        return number.name, 128 + number
    error = signals.failure() or error
    if error is None:
        return FINISHED, 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return one_line(error), error.code
    if isinstance(error, UserError):
        return one_line(error), error.exit_code
    known = isinstance(error, TrainingStopped | RankDied | StageTimeout)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}", 1


def attempt_paths(folder: Path) -> dict[int, Path]:
    """Return what is named `attempt_K` in `logs/` or `superseded/`, by its number, in order."""
    named = {path.name.removeprefix("attempt_"): path for path in folder.glob("attempt_*")}
    return dict(sorted((int(name), path) for name, path in named.items() if name.isdecimal()))


def read_attempts(logs: Path) -> dict[int, AttemptRecord | None]:
    """Read the records below a run's `logs/` by the attempt's number, in order; None where none can be read."""
    found: dict[int, AttemptRecord | None] = {}
    for number, folder in attempt_paths(logs).items():
        if folder.is_dir():
            found[number] = None
            with suppress(OSError, ValueError):
                text = (folder / ATTEMPT_FILE).read_text(encoding="utf-8")
                found[number] = AttemptRecord.model_validate_json(text)
    return found


def seconds_of_all(attempts: Mapping[int, AttemptRecord | None]) -> dict[str, float]:
    """Return a run's seconds by stage, as far as its attempts' records go."""
    total: Counter[str] = Counter()
    for record in attempts.values():
        total.update(record.seconds if record is not None else {})
    return dict(total)
