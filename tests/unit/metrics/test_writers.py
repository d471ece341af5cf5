"""metrics.jsonl and TensorBoard, written, torn and resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.metrics.writers import MetricLog, read_metrics


def write_steps(folder: Path, steps: range, value: float, resumed_step: int | None, tensorboard: bool = False) -> None:
    log = MetricLog(folder, tensorboard=tensorboard, resumed_step=resumed_step)
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


def test_a_resumed_log_continues_after_its_step(tmp_path):
    write_steps(tmp_path, range(1, 6), 0.0, None)
    write_steps(tmp_path, range(4, 8), 100.0, 3)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["reward/mean"] for row in rows] == [1.0, 2.0, 3.0, 104.0, 105.0, 106.0, 107.0]


@pytest.mark.parametrize("torn", [b'{"step":3,"rew', b"\x00\x00\x00", b'{"step":3}\n{', b"null\n"])
def test_a_torn_last_line_goes_away(tmp_path, torn):
    write_steps(tmp_path, range(1, 3), 0.0, None)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    whole = [1, 2, 3] if torn.startswith(b'{"step":3}') else [1, 2]
    assert [row["step"] for row in read_metrics(tmp_path)] == whole
    write_steps(tmp_path, range(3, 4), 0.0, 2)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


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
