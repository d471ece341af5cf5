"""What is known of each start of a run: `logs/attempt_K/attempt.json`, from which goodput and restarts are told.

A record is written when the attempt starts, kept up to date while it trains, and completed when it ends. What was
killed leaves the last one: it has no end, and `seen` is when it was last known to live.
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

from megasharp import signals
from megasharp.config.core import Section
from megasharp.errors import RankDied, StageTimeout, TrainingStopped, UserError, one_line
from megasharp.files import write_text

ATTEMPT_FILE = "attempt.json"
# Seconds between two records of an attempt that trains: each is flushed to the disk, which must cost nothing.
_BETWEEN_RECORDS = 5.0


class AttemptRecord(Section):
    """One start of a run; times in seconds since 1970, `seconds` by stage as the run's clock names them.

    `from_step` is the checkpoint's step it began after (0: the beginning), `first_step` and `last_step` the steps it
    finished, null before the first. `ended`, `reason` and `exit_code` are null of an attempt that lives or was killed.
    `gave_up`: the run ended itself, and would again.
    """

    started: float
    seen: float
    ended: float | None = None
    reason: str | None = None
    exit_code: int | None = None
    gave_up: bool = False
    from_step: int = 0
    first_step: int | None = None
    last_step: int | None = None
    seconds: dict[str, float] = {}
    host: str = ""
    pid: int = 0
    slurm_job_id: str | None = None
    slurm_restart_count: int | None = None


class AttemptLog:
    """Keeps the record of the attempt whose logs are in `folder`; a context manager, whose body is the attempt.

    `began` is when its command did, in seconds since 1970: imports and checks are the attempt's time too. A record that
    cannot be written is left out: the run has its own words for a full disk.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time, *, began: float | None = None) -> None:
        self._path = folder / ATTEMPT_FILE
        self._now = now
        self._written = now()
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        self.record = AttemptRecord(
            started=self._written if began is None else began,
            seen=self._written,
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

    def resumed(self, step: int) -> None:
        """The attempt goes on after the checkpoint of `step`."""
        self._change(from_step=step)
        self._write()

    def finished(self, step: int, seconds: Mapping[str, float]) -> None:
        """Step `step` is done; `seconds` by stage since the attempt's start."""
        first = step if self.record.first_step is None else self.record.first_step
        self._change(first_step=first, last_step=step, seconds=dict(seconds))
        if self.record.seen - self._written >= _BETWEEN_RECORDS:
            self._write()

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Seconds by stage since the attempt's start, with what came after the last step."""
        self._change(seconds=dict(seconds))
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """The attempt is over, by this error or by none."""
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
    """The reason in a few words, and the exit code that the command has for it."""
    number = signals.arrived()
    if number is not None:
        return number.name, 128 + number
    error = signals.failure() or error
    if error is None:
        return "finished", 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return one_line(error), error.code
    if isinstance(error, UserError):
        return one_line(error), error.exit_code
    known = isinstance(error, TrainingStopped | RankDied | StageTimeout)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}", 1


def read_attempts(logs: Path) -> dict[int, AttemptRecord | None]:
    """The records below a run's `logs/` by the attempt's number, in order; None where there is none that reads."""
    folders = {path.name.removeprefix("attempt_"): path for path in logs.glob("attempt_*") if path.is_dir()}
    numbers = sorted(int(name) for name in folders if name.isdecimal())
    return {number: _read(folders[str(number)] / ATTEMPT_FILE) for number in numbers}


def seconds_of_all(attempts: Mapping[int, AttemptRecord | None]) -> dict[str, float]:
    """Seconds by stage of a run, as far as its attempts' records tell."""
    total: Counter[str] = Counter()
    for record in attempts.values():
        total.update(record.seconds if record is not None else {})
    return dict(total)


def _read(path: Path) -> AttemptRecord | None:
    try:
        return AttemptRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
