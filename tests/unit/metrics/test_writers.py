"""metrics.jsonl and TensorBoard, written, torn and resumed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megasharp.common.errors import UserError
from megasharp.metrics.writers import MetricLog, read_metrics, rows_from_end, rows_of


def write_steps(folder: Path, steps: range, value: float, resumed_step: int | None, tensorboard: bool = False) -> None:
    aside = folder / "superseded" / "attempt_2"
    log = MetricLog(folder, tensorboard=tensorboard, resumed_step=resumed_step, superseded=aside)
    for step in steps:
        log.write(step, {"reward/mean": value + step})
    log.close()


def test_rows_read_back_and_are_visible_before_close(tmp_path):
    log = MetricLog(tmp_path, tensorboard=False, resumed_step=None)
    log.write(1, {"reward/mean": 0.5})
    log.write(1, {"eval/dev/pass@1": 0.25})
    rows = read_metrics(tmp_path)
    log.close()
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows] == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 1, "eval/dev/pass@1": 0.25},
    ]
    assert all(row["time"] > 1.6e9 for row in rows)


def test_rows_are_forced_to_the_disk_on_request(tmp_path, monkeypatch):
    """With all that was written before, and the name of a file that may be new."""
    forced: dict[str, int] = {}

    def fsync(descriptor: int) -> None:
        forced[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size

    log = MetricLog(tmp_path, tensorboard=False, resumed_step=None)
    log.write(1, {"reward/mean": 0.5})
    monkeypatch.setattr(os, "fsync", fsync)
    log.sync()
    log.close()
    path = tmp_path / "metrics.jsonl"
    assert forced.keys() == {str(path), str(tmp_path)} and forced[str(path)] == path.stat().st_size > 0


def test_figures_that_json_cannot_hold_are_null(tmp_path):
    log = MetricLog(tmp_path, tensorboard=False, resumed_step=None)
    log.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e300})
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, None, 1e300)


def train(folder: Path, steps: range, figures: int = 1) -> None:
    """Rows of steps as a run writes them: a step's training, then the save of every second one."""
    log = MetricLog(folder, tensorboard=False, resumed_step=None)
    for step in steps:
        log.write(step, {"time/step": 1.0, **{f"figure/{number}": 0.5 for number in range(figures)}})
        if step % 2 == 0:
            log.write(step, {"time/checkpoint": 1.0})
    log.close()


def aside(folder: Path, number: int) -> Path:
    return folder / "superseded" / f"attempt_{number}"


def cut(folder: Path, last: int, number: int) -> None:
    MetricLog(folder, tensorboard=False, resumed_step=last, superseded=aside(folder, number)).close()


def test_rows_that_are_repeated_move_aside_byte_for_byte(tmp_path: Path) -> None:
    train(tmp_path, range(8))
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    cut(tmp_path, 4, 2)
    assert [(row["step"], "time/step" in row) for row in read_metrics(tmp_path)][-3:] == [
        (3, True),
        (4, True),
        (4, False),
    ]
    assert path.read_bytes() + (aside(tmp_path, 2) / "metrics.jsonl").read_bytes() == before
    cut(tmp_path, 4, 3)
    assert not aside(tmp_path, 3).exists(), "nothing was repeated"


@pytest.mark.parametrize("call", ["rename", "truncate"])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_while_rows_move_loses_none_and_doubles_none(tmp_path: Path, call: str, after: bool) -> None:
    """SIGKILL before and after each system call by which they do."""
    train(tmp_path, range(8))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for number in range(1, 9):
        if os.fork() == 0:
            trace = KillAt(call, number, after)
            sys.setprofile(trace)
            cut(tmp_path, 4, number + 1)
            os._exit(7)
        _, status = os.wait()
        if os.WIFEXITED(status):
            break
    assert 1 < number < 8 and os.WEXITSTATUS(status) == 7, "killed at least once, and then not any more"
    moved = sorted(tmp_path.glob("superseded/*/metrics.jsonl"))
    assert len(moved) == 1 and (tmp_path / "metrics.jsonl").read_bytes() + moved[0].read_bytes() == whole
    assert list(tmp_path.rglob(".*")) == []


class KillAt:
    """Kills this process before, or after, its n-th call of a function of that name written in C."""

    def __init__(self, name: str, number: int, after: bool) -> None:
        self._name, self._left, self._event = name, number, "c_return" if after else "c_call"

    def __call__(self, frame: object, event: str, function: Any) -> None:
        if event == self._event and getattr(function, "__name__", "") == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def read_by(call: Callable[[], object]) -> int:
    """The bytes that this process reads in a call."""

    def counted() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    counted()
    before = counted()
    call()
    return counted() - before


def bytes_read(folder: Path, last: int) -> list[int]:
    """Of the last row, of the rows of a step, and of a resume after it."""
    train(folder, range(last + 2), figures=100)
    rows: list[Any] = []
    costs = [
        read_by(lambda: next(rows_from_end(folder))),
        read_by(lambda: rows.extend(rows_of(folder, last))),
        read_by(lambda: cut(folder, last, 2)),
    ]
    assert [row["step"] for row in rows] == [last, last] and read_metrics(folder)[-1]["step"] == last
    return costs


def test_a_long_log_is_opened_by_reading_its_end_alone(tmp_path: Path) -> None:
    """A hundred times as many rows cost nothing."""
    short, long = bytes_read(tmp_path / "short", 38), bytes_read(tmp_path / "long", 3998)
    assert (tmp_path / "long" / "metrics.jsonl").stat().st_size > 6e6
    assert max(b - a for a, b in zip(short[::2], long[::2], strict=True)) <= 4096 and max(long) < 400_000, (short, long)


def test_a_row_whose_newline_was_lost_stays_a_row(tmp_path: Path) -> None:
    train(tmp_path, range(4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    cut(tmp_path, 3, 2)
    write_steps(tmp_path, range(4, 5), 0.0, 3)
    assert [row["step"] for row in read_metrics(tmp_path)][-2:] == [3, 4]


def test_a_resumed_log_continues_after_its_step(tmp_path):
    write_steps(tmp_path, range(1, 6), 0.0, None)
    write_steps(tmp_path, range(4, 8), 100.0, 3)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["reward/mean"] for row in rows] == [1.0, 2.0, 3.0, 104.0, 105.0, 106.0, 107.0]


@pytest.mark.parametrize("torn", [b'{"step":3,"rew', b"\x00\x00\x00", b'{"step":3}\n{'])
def test_a_torn_last_line_goes_away(tmp_path, torn):
    write_steps(tmp_path, range(1, 3), 0.0, None)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    whole = [1, 2, 3] if torn.startswith(b'{"step":3}') else [1, 2]
    assert [row["step"] for row in read_metrics(tmp_path)] == whole
    write_steps(tmp_path, range(3, 4), 0.0, 2)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_last_line_that_was_damaged_moves_aside(tmp_path: Path) -> None:
    """A whole line is a record: a killed process leaves half of one."""
    train(tmp_path, range(4))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"nonsense\n")
    cut(tmp_path, 9, 2)
    assert (aside(tmp_path, 2) / "metrics.jsonl").read_bytes() == b"nonsense\n"
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 0, 1, 2, 2, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        read_metrics(tmp_path)


def test_a_new_run_does_not_touch_an_old_log(tmp_path):
    write_steps(tmp_path, range(1, 3), 0.0, None)
    with pytest.raises(UserError, match="already has metrics"):
        MetricLog(tmp_path, tensorboard=False, resumed_step=None)
    assert len(read_metrics(tmp_path)) == 2


def test_minus_one_keeps_nothing_and_a_missing_log_is_empty(tmp_path):
    assert read_metrics(tmp_path) == []
    write_steps(tmp_path, range(3), 0.0, None)
    write_steps(tmp_path, range(1), 7.0, -1)
    assert [row["reward/mean"] for row in read_metrics(tmp_path)] == [7.0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    log = MetricLog(tmp_path, tensorboard=False, resumed_step=None)
    monkeypatch.setattr(log, "_path", Path("/dev/full"))
    monkeypatch.setattr(log, "_file", log._path.open("a", encoding="utf-8"))
    for call in (lambda: log.write(1, {"a": 1.0}), log.close):
        with pytest.raises(UserError, match="No space left") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_tensorboard_shows_one_curve_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, range(1, 6), 0.0, None, tensorboard=True)
    write_steps(tmp_path, range(4, 8), 100.0, 3, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0), (7, 107.0)]
