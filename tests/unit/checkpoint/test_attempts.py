"""The record of an attempt: what it says while it lives, when it ends, and when it was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import each_case

from megasharp.checkpoint.attempts import ATTEMPT_FILE, AttemptLog, AttemptRecord, read_attempts
from megasharp.common import signals
from megasharp.common.errors import RankDied, RunFailed, TrainingStopped, UserError


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def attempt_in(logs: Path, number: int = 1, clock: Clock | None = None) -> AttemptLog:
    folder = logs / f"attempt_{number}"
    folder.mkdir(parents=True)
    return AttemptLog(folder, clock or Clock())


def read(logs: Path, number: int = 1) -> AttemptRecord:
    record = read_attempts(logs)[number]
    assert record is not None
    return record


def test_a_killed_attempt_has_no_end_and_was_seen_at_its_last_record(tmp_path: Path) -> None:
    clock = Clock()
    log = attempt_in(tmp_path, clock=clock)
    log.resumed(4)
    for step in (5, 6, 7):
        clock.time += 3.0
        log.finished(step, {"rollout": float(step)})
    found = read(tmp_path)
    # Recorded when more than five seconds had passed, not at every step.
    assert (found.seen, found.first_step, found.last_step) == (106.0, 5, 6)
    assert (found.ended, found.reason, found.exit_code) == (None, None, None)
    assert (found.started, found.from_step, found.pid, found.seconds) == (100.0, 4, os.getpid(), {"rollout": 6.0})


def test_an_attempt_begins_when_its_command_did(tmp_path: Path) -> None:
    clock = Clock()
    log = AttemptLog(tmp_path, clock, began=83.0)
    clock.time = 101.0
    assert log.age == 18.0
    log.end(None)
    assert (log.record.started, log.record.ended) == (83.0, 101.0)


@each_case(
    ("error", "reason", "code"),
    [
        (None, "finished", 0),
        (UserError("disk full"), "disk full", 2),
        (RunFailed("engine 0 is dead"), "engine 0 is dead", 1),
        (TrainingStopped("five steps"), "five steps", 1),
        (RankDied("rank 3"), "rank 3", 1),
        (ValueError("two\nlines"), "ValueError: two lines", 1),
        (SystemExit(75), "75", 75),
    ],
)
def test_an_end_has_its_reason_and_exit_code(
    tmp_path: Path, error: BaseException | None, reason: str, code: int
) -> None:
    clock = Clock()
    log = attempt_in(tmp_path, clock=clock)
    log.finished(1, {"update": 2.0})
    log.spent({"update": 2.0, "eval": 1.0})
    clock.time = 160.0
    log.__exit__(type(error) if error else None, error, None)
    found = read(tmp_path)
    assert (found.ended, found.reason, found.exit_code) == (160.0, reason, code)
    assert (found.last_step, found.seconds) == (1, {"update": 2.0, "eval": 1.0})


def test_a_signal_is_the_cause_whatever_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "arrived", lambda: signals.NUMBERS[0])
    log = attempt_in(tmp_path)
    log.__exit__(RuntimeError, RuntimeError("torn apart"), None)
    assert (read(tmp_path).reason, read(tmp_path).exit_code) == ("SIGTERM", 143)


def test_slurm_says_which_job_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    attempt_in(tmp_path)
    assert (read(tmp_path).slurm_job_id, read(tmp_path).slurm_restart_count) == ("4711", 2)


def test_attempts_come_in_order_and_old_or_damaged_ones_are_none(tmp_path: Path) -> None:
    for number in (10, 2):
        attempt_in(tmp_path, number)
    (tmp_path / "attempt_1").mkdir()
    (tmp_path / "attempt_3").mkdir()
    (tmp_path / "attempt_3" / ATTEMPT_FILE).write_text("{")
    (tmp_path / "attempt_copy").mkdir()
    found = read_attempts(tmp_path)
    assert list(found) == [1, 2, 3, 10]
    assert [record is None for record in found.values()] == [True, False, True, False]


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    log = attempt_in(tmp_path)
    (tmp_path / "attempt_1" / ATTEMPT_FILE).unlink()
    (tmp_path / "attempt_1").rmdir()
    (tmp_path / "attempt_1").write_text("in the way")
    log.__exit__(None, None, None)
