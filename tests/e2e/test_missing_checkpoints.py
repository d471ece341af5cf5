"""A real run whose checkpoints are missing is not begun again, by no automatic restart either, and loses no byte."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from quickstart import Command
from waiting import HANG_S, wait_until

from megasharp.cluster.slurm.node import EXIT_CODE
from megasharp.metrics.writers import read_metrics


def content(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.long("runs")
def test_a_resume_without_its_checkpoints_changes_nothing(command: Command, tmp_path: Path) -> None:
    """Moved away, then a link to nowhere; by --resume, under --retries, and as a requeued job's node runs it."""
    root, kept = command.runs / "a", tmp_path / "kept"
    command.run(*command.train("steps=3", "name=a", "checkpoint.every=2"))
    (root / "checkpoints").rename(kept)
    before = content(root)
    resumed = command.train("steps=4", "name=a", "checkpoint.every=2", "--resume")
    said = command.run(*resumed, code=2)
    assert "metrics.jsonl has rows up to step 3" in said and said.count("\n") == 1, said
    (root / "checkpoints").symlink_to("/nowhere/scratch")
    said = command.run(*resumed, "--retries", "3", code=2)
    assert "is a link to /nowhere/scratch, which is not there" in said and "restart" not in said, said
    job = tmp_path / "job"
    job.mkdir()
    node = command.start(
        *("--folder", str(job), "--", sys.executable, "-P", "-m", "megasharp.cli", *resumed, "--retries", "3"),
        program=("-m", "megasharp.cluster.slurm.node"),
        environment={"MEGASHARP_NODES": "node0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )
    node.communicate(timeout=HANG_S)
    assert node.returncode == 2 and (job / EXIT_CODE).read_text() == "2\n", "job.sbatch queues again after 75 alone"
    assert content(root) == before

    (root / "checkpoints").unlink()
    kept.rename(root / "checkpoints")
    assert "after step 3" in command.run(*resumed)
    out = command.run(*command.train("steps=1", "name=a", "--start-over", "--retries", "1"))
    old = Path(next(line for line in out.splitlines() if "the old run is now" in line).rpartition(" ")[2])
    assert old.parent == root.parent
    assert [row["step"] for row in read_metrics(old) if "time/step" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in command.rows("a")] == [1]


@pytest.mark.long("runs")
def test_a_kill_before_the_first_checkpoint_costs_an_attempt_and_no_row(command: Command) -> None:
    process = command.start(*command.train("steps=6", "name=a", "checkpoint.every=50"), "--retries", "2")
    root = command.runs / "a"
    metrics = root / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    (run,) = (one for one in psutil.Process(process.pid).children() if "train" in one.cmdline())
    run.send_signal(signal.SIGKILL)
    out, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, error
    assert "no checkpoint was complete yet, so the run begins again at step 1" in out
    moved = [row["step"] for row in read_metrics(root / "superseded" / "attempt_2") if "time/step" in row]
    assert moved == list(range(1, len(moved) + 1)) and len(moved) > 1
    assert len(list((root / "superseded" / "attempt_2" / "rollouts").iterdir())) >= len(moved)
    assert [row["step"] for row in command.rows("a")] == list(range(1, 7))
    shown = " ".join(command.run("runs", "show", str(root)).split())
    assert "superseded/ has the earlier records of what attempt 2 did again" in shown
