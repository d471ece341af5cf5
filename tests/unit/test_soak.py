"""The soak's own checks find what they are for: a lost prompt, a repeated step, a driver that grows."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.soak import checks
from tests.soak.faults import deck, shift_clock

STEPS = 3


def write_run(
    root: Path, prompts: list[str], steps: list[int], waiting: list[int], position: int, epoch: int = 0
) -> None:
    """Write as much of a run folder as the checks read: a group a step."""
    (root / "rollouts").mkdir(parents=True)
    for step, prompt in zip(steps, prompts, strict=True):
        rows = [{"step": step, "group_id": 0, "prompt_id": prompt, "index": n} for n in range(checks.RESPONSES)]
        pq.write_table(pa.Table.from_pylist(rows), root / f"rollouts/step_{step:06d}.parquet")
    (root / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "policy/loss": 0.0}) + "\n" for step in steps)
    )
    folder = root / f"checkpoints/step_{STEPS:06d}"
    folder.mkdir(parents=True)
    pending = [{"epoch": 0, "position": place} for place in waiting]
    cursor = {"epoch": epoch, "position": position}
    manifest = {"files": {"a.distcp": {"sha256": str(position)}}, "pending": pending, "cursor": cursor}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def stream() -> list[str]:
    """Return the order in which the runs of the soak see their prompts."""
    data = checks.REPOSITORY / "examples/quickstart/data/train.jsonl"
    names = [json.loads(line)["id"] for line in data.open()]
    random.Random("prompts-1-0").shuffle(names)
    return names


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with nothing wrong."""
    monkeypatch.setattr(checks, "complete_steps", lambda folder: [STEPS])
    write_run(tmp_path / "run", stream()[:3], [1, 2, 3], waiting=[3], position=4)
    return tmp_path / "run"


def test_a_prompt_that_is_lost_or_trained_on_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "complete_steps", lambda folder: [STEPS])
    names = stream()
    write_run(tmp_path / "whole", names[:3], [1, 2, 3], waiting=[3], position=4)
    assert checks.prompts_once(tmp_path / "whole") == checks.steps_once(tmp_path / "whole", STEPS) == []
    write_run(tmp_path / "lost", [names[0], names[0], names[2]], [1, 2, 3], waiting=[3], position=4)
    assert "1 prompts lost, 1 too often" in checks.prompts_once(tmp_path / "lost")[0]
    write_run(tmp_path / "again", names[:3], [1, 3, 3], waiting=[3], position=4)
    assert "out of order at [3, 3]" in checks.steps_once(tmp_path / "again", STEPS)[0]


def test_prompts_of_an_earlier_epoch_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "complete_steps", lambda folder: [STEPS])
    monkeypatch.setattr(checks, "REPOSITORY", tmp_path)
    data = tmp_path / "examples/quickstart/data/train.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text('{"id": "a"}\n{"id": "b"}\n')
    second = ["a", "b"]
    random.Random("prompts-1-1").shuffle(second)
    for name, prompts in (("whole", ["b", "a", second[0]]), ("lost", ["b", "b", second[0]])):
        write_run(tmp_path / name, prompts, [1, 2, 3], waiting=[], position=1, epoch=1)
    assert checks.prompts_once(tmp_path / "whole") == []
    assert "1 prompts lost, 1 too often" in checks.prompts_once(tmp_path / "lost")[0]


def test_a_group_that_misses_a_response_or_has_one_twice_is_found(run: Path) -> None:
    table = pq.read_table(run / "rollouts/step_000001.parquet")
    pq.write_table(table.slice(1), run / "rollouts/step_000001.parquet")
    assert "1 groups have not 8 responses" in checks.prompts_once(run)[0]
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), run / "rollouts/step_000001.parquet")
    assert "1 groups have not 8 responses" in checks.prompts_once(run)[0]


def test_a_history_that_differs_in_a_value_a_prompt_or_a_weight_is_found(run: Path) -> None:
    calm = json.loads(json.dumps(checks.history_of(run)))
    assert checks.same_history(run, calm) == []
    for part, told in (
        ("rows", "in rows: {'policy/loss': 1}"),
        ("groups", "groups differ"),
        ("weights", "weights differ"),
    ):
        other = copy.deepcopy(calm)
        if part == "rows":
            other["rows"][1]["policy/loss"] = 1.0
        elif part == "groups":
            other["groups"][0][1] = "another"
        else:
            other["weights"]["a.distcp"] = "another"
        assert told in " ".join(checks.same_history(run, other))


def test_files_that_are_more_than_planned_are_named() -> None:
    sizes = {"metrics": (0.9, 1.3), "rollouts": (10.0, 12.0), "checkpoints": (10.0, 16.0)}
    assert checks.larger_than_planned(sizes) == ["checkpoints: plan says 10.0 MB, 16.0 MB are there"]


def test_a_job_that_ended_for_want_of_space_is_told_from_one_that_failed() -> None:
    log = "megasharp: /runs/soak/step.parquet: no space left on the disk\nRay: Node 6dc5 received SIGTERM\n"
    assert checks.is_of_full_disk(checks.told_at_the_end(log))
    assert not checks.is_of_full_disk(checks.told_at_the_end(log + "megasharp: rank 0 ended\nRay: Node 6dc5 ...\n"))
    assert checks.told_at_the_end("") == "no output"


def test_growth_is_told_from_one_jump_of_the_allocator() -> None:
    def growth(by_step: float, jump: float) -> float:
        return checks.memory_growth([(n, 400 + by_step * n + jump * (n > 800)) for n in range(1, 1001)])

    assert growth(0.02, 0) == pytest.approx(2.0)
    assert growth(0.0, 8) < checks.MB_PER_100_STEPS < growth(0.02, 8)


# Waits on a condition and on a semaphore until a tenth of a second from now by the wall clock.
_WAITS = """
import ctypes, time
library = ctypes.CDLL(None)
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]
def soon():
    return Time(*divmod(time.time_ns() + 10**8, 10**9))
condition, mutex, semaphore = (ctypes.create_string_buffer(64) for _ in range(3))
began = time.monotonic()
library.pthread_mutex_lock(mutex)
library.pthread_cond_timedwait(condition, mutex, ctypes.byref(soon()))
library.sem_timedwait(semaphore, ctypes.byref(soon()))
assert time.monotonic() - began >= 0.2
print(time.time())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_clock_of_a_run_is_shifted_and_its_waits_are_not(tmp_path: Path) -> None:
    """Without the shift of its waits the program would stand still for an hour, or for none of the time."""
    source, library, offset = (tmp_path / name for name in ("clock.c", "clock.so", "offset"))
    source.write_bytes((checks.REPOSITORY / "tests/soak/shifted_clock.c").read_bytes())
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    for shift in (3600, -3600):
        shift_clock(offset, shift)
        environment = {**os.environ, "LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(offset)}
        command = [sys.executable, "-c", _WAITS]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
        assert abs(float(done.stdout) - time.time() - shift) < 60


def test_each_fault_comes_once_before_any_comes_again() -> None:
    drawn = deck(["a", "b", "c"], random.Random(1))
    first, second = ([next(drawn) for _ in range(3)] for _ in range(2))
    assert sorted(first) == sorted(second) == ["a", "b", "c"]
