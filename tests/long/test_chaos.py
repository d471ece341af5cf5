"""A run of 60 steps under the supervisor, through kills, a stop, an error, saves that are cut off and a damaged
checkpoint: it ends as the run that nothing happened to, bit for bit, with no group lost and none trained on twice.

The steps at which things happen are drawn; CHAOS_SEED draws others.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from megasharp.checkpoint.attempts import read_attempts
from megasharp.common.stack_dumps import read_process
from megasharp.common.supervisor import Supervisor
from tests.faults.injector import VARIABLE, Fault, not_fired, write_schedule

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, EVERY = 60, 10
OPTIONS = [
    *("train", "examples/quickstart/run.yaml", f"steps={STEPS}", f"checkpoint.every={EVERY}", "policy.dp=2"),
    *("data.prompts_per_step=8", "eval.suites=[]", "eval.every=0", "log.tensorboard=false", "deterministic=true"),
]
# What the time decides, and what attempts have of their own.
OF_THE_CLOCK = ("time", "update/", "mem/", "gpu/", "rollout/tokens_per_second")
pytestmark = [pytest.mark.long("saves"), pytest.mark.timeout(1800)]


def schedule(seed: int) -> list[Fault]:
    """No more than two restarts begin at one checkpoint, so the supervisor does not give up."""
    draw = random.Random(seed)
    return [
        Fault("rank_killed", "kill", "1", draw.randint(12, 18)),
        Fault("rank_killed_in_save", "kill", "0", 20, "save"),
        Fault("delay", "delay", "0", draw.randint(21, 24), seconds=1.0),
        Fault("driver_killed", "kill", step=draw.randint(33, 38), point="step"),
        Fault("byte_flipped", "corrupt", after="driver_killed"),
        Fault("rank_stopped", "stop", "1", draw.randint(42, 46)),
        Fault("driver_killed_in_save", "kill", step=50, point="save"),
        Fault("error", "raise", "0", draw.randint(53, 58)),
    ]


def attempts(root: Path, *more: str) -> list[str]:
    """The command of an attempt; its run is `root`."""
    options = [*OPTIONS, f"name={root.name}", "--runs", str(root.parent), *more]
    return [sys.executable, "-m", "tests.faults.train", str(root), *options]


def rows(root: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    told = [{name: value for name, value in row.items() if not name.startswith(OF_THE_CLOCK)} for row in found]
    # The seconds of a save have a row, which a kill right after the save leaves out.
    return [row for row in told if row.keys() != {"step"}]


def groups(root: Path) -> list[tuple[int, str]]:
    """Step and prompt of every group that was trained on, in order: the data's first epoch has each prompt once."""
    tables = [pq.read_table(path, columns=["step", "prompt_id"]) for path in sorted(root.glob("rollouts/*.parquet"))]
    # A row is a response; a group's are neighbours.
    return [pair for t in tables for pair in zip(*(t[name].to_pylist()[::8] for name in t.column_names), strict=True)]


def weights(root: Path) -> dict[str, str]:
    """Hashes of the last checkpoint's files of weights and optimizer."""
    manifest = json.loads((root / f"checkpoints/step_{STEPS:06d}/manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}


def test_a_run_comes_through_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seed = int(os.environ.get("CHAOS_SEED", "0"))
    calm, chaos = tmp_path / "calm", tmp_path / "chaos"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    write_schedule(tmp_path / "none", [])
    subprocess.run(attempts(calm), check=True, stdout=subprocess.DEVNULL)

    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))
    write_schedule(tmp_path / "faults", schedule(seed))
    others = set(psutil.Process().children(recursive=True))
    said: list[str] = []
    code = Supervisor(attempts(chaos, "guard.stage_timeout_s=30"), chaos, said.append).run(20)
    print(f"CHAOS_SEED={seed}", *said, sep="\n")

    assert code == 0, said
    assert not_fired(tmp_path / "faults") == []
    assert set(psutil.Process().children(recursive=True)) <= others
    # Those whose driver was killed are nobody's children.
    records = sorted(chaos.glob("logs/attempt_*/rank_*.log"))
    assert len(records) >= 14
    assert [log for log in records if (rank := read_process(log)) is None or rank.state() not in ("gone", "Z")] == []
    told = "\n".join(said)
    for words in ("rank 1 ended with exit code -9", "rank 0 ended with exit code -9", "ended by SIGKILL"):
        assert words in told
    assert "rank 1 is stopped (state T, as by SIGSTOP)" in told and "rank 0 failed in step: fault error" in told
    assert (chaos / "checkpoints" / "damaged_step_000030").exists()
    assert len(read_attempts(chaos / "logs")) >= 7

    assert [row["step"] for row in rows(chaos)] == list(range(1, STEPS + 1))
    trained = groups(chaos)
    assert len(trained) == len({prompt for _, prompt in trained}) == 8 * STEPS
    assert trained == groups(calm)
    assert rows(chaos) == rows(calm)
    assert weights(chaos) == weights(calm) != {}


def test_a_run_that_gives_up_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is not a number, on one of two ranks, twice in a row."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))
    write_schedule(tmp_path / "faults", [Fault(f"nan_{step}", "nan", "1", step) for step in (3, 4)])
    root, said = tmp_path / "run", []
    code = Supervisor(attempts(root, "guard.nan_limit=2"), root, said.append).run(5)
    assert (code, said) == (1, []) and not_fired(tmp_path / "faults") == []
    assert [row["policy/skipped"] for row in rows(root)] == [0, 0, 1, 1]
    assert (root / "checkpoints" / "latest").read_text() == "step_000004\n"
    (record,) = read_attempts(root / "logs").values()
    assert record is not None and record.gave_up and "stopped at step 4 with a checkpoint" in str(record.reason)


def test_a_bit_that_is_flipped_on_one_of_two_ranks_reaches_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the interval, and before a save: the run stops, names what and where, and goes on from the good one."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))
    write_schedule(tmp_path / "faults", [Fault("rank1", "flip", "1", 5), Fault("rank0", "flip", "0", 9)])
    root, said = tmp_path / "run", []
    more = ("steps=10", "checkpoint.every=3", "guard.replica_check_every=5")
    assert Supervisor(attempts(root, *more), root, said.append).run(5) == 0, said
    assert not_fired(tmp_path / "faults") == []
    found = [str(record.reason) for record in read_attempts(root / "logs").values() if record is not None][:-1]
    for line, step, good in zip(found, (5, 9), (3, 6), strict=True):
        assert line.startswith(f"silent data corruption: after step {step}, embedding.word_embeddings.weight differs")
        assert "between rank 0 (" in line and "and rank 1 (" in line and "(1 of " in line
        assert f"the last good checkpoint is {root}/checkpoints/step_{good:06d}: --resume" in line
        assert line in "\n".join(said)
    assert [row["step"] for row in rows(root)] == list(range(1, 11))
