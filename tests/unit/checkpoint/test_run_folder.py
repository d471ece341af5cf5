"""A run's folder is made once, never overwritten, and held by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megasharp.checkpoint.run_folder import open_run
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.errors import UserError
from megasharp.evals.probe import step_file
from megasharp.metrics.response_table import table_name, write_rollouts
from megasharp.metrics.writers import MetricLog
from tests.unit.saving import save_at_once


def test_a_new_run(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "runs" / "a", "name: a\n", resume=False)
    assert (tmp_path / "runs/a/config.yaml").read_text() == "name: a\n"
    assert folder.attempt == 1 and folder.logs.is_dir() and folder.logs.name == "attempt_1"
    assert folder.evals(7) == tmp_path / "runs/a/evals/step_000007"
    folder.close()


def recorded(root: Path, step: int) -> None:
    log = MetricLog(root, tensorboard=False, resumed_step=None)
    log.write(step, {"reward/mean": 0.5})
    log.close()


def with_a_step(root: Path) -> None:
    recorded(root, 1)


def with_a_checkpoint(root: Path) -> None:
    store = CheckpointStore(root / "checkpoints", 1, None)
    save_at_once(store, RunState("base", step=1), lambda folder: None)


def with_a_strangers_file(root: Path) -> None:
    (root / "thesis.txt").write_text("x")


@pytest.mark.parametrize("left", [with_a_step, with_a_checkpoint, with_a_strangers_file])
def test_an_existing_run_is_not_overwritten(tmp_path: Path, left: Callable[[Path], None]) -> None:
    open_run(tmp_path / "a", "old", resume=False).close()
    left(tmp_path / "a")
    before = sorted((tmp_path / "a").rglob("*"))
    with pytest.raises(UserError, match="a: this run exists; continue it with --resume"):
        open_run(tmp_path / "a", "new", resume=False)
    assert (tmp_path / "a/config.yaml").read_text() == "old"
    assert sorted((tmp_path / "a").rglob("*")) == before


def test_a_folder_that_only_looks_like_a_run_is_left_alone(tmp_path: Path) -> None:
    """Other programs have a config.yaml and checkpoints too."""
    root = tmp_path / "a"
    (root / "checkpoints" / "mine").mkdir(parents=True)
    (root / "config.yaml").write_text("theirs")
    with pytest.raises(UserError, match="this run exists"):
        open_run(root, "new", resume=False)
    assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "config.yaml"]
    assert (root / "config.yaml").read_text() == "theirs"


def test_what_ended_before_its_first_step_starts_anew(tmp_path: Path) -> None:
    """Its logs stay; its evaluation before training, which is another configuration's, moves aside."""
    root = tmp_path / "a"
    first = open_run(root, "old", resume=False)
    (first.logs / "engine_0.log").write_text("out of memory")
    recorded(root, 0)
    first.evals(0).mkdir(parents=True)
    (first.evals(0) / "dev.json").write_text("{}")
    CheckpointStore(root / "checkpoints", 1, None)
    (root / ".config.yaml.7.partial").write_text("torn")
    first.close()

    again = open_run(root, "new", resume=False)
    again.close()
    assert (again.attempt, again.resumed) == (2, False)
    assert (root / "config.yaml").read_text() == "new"
    assert (root / "logs/attempt_1/engine_0.log").read_text() == "out of memory"
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert there == {
        ".lock",
        "config.yaml",
        "run.json",
        "logs/attempt_1/config.yaml",
        "logs/attempt_1/engine_0.log",
        "logs/attempt_2/config.yaml",
        "superseded/attempt_2/metrics.jsonl",
        "superseded/attempt_2/evals/step_000000/dev.json",
    }

    resumed = open_run(root, "new", resume=True)
    resumed.close()
    assert (resumed.attempt, resumed.resumed) == (3, True)


def test_resume_counts_attempts(tmp_path: Path) -> None:
    open_run(tmp_path / "a", "one", resume=False).close()
    again = open_run(tmp_path / "a", "two", resume=True)
    assert again.attempt == 2
    assert (tmp_path / "a/config.yaml").read_text() == "one" and (again.logs / "config.yaml").read_text() == "two"
    again.store_config("two")
    assert (tmp_path / "a/config.yaml").read_text() == "two"
    again.close()


def test_what_is_repeated_moves_aside(tmp_path: Path) -> None:
    """Evaluations, probes and tables of responses of later steps; what bears no step's number stays."""
    folder = open_run(tmp_path / "run", "", resume=False)
    rollouts = folder.root / "rollouts"
    rollouts.mkdir()
    tokens, probes = folder.root / "rollout_tokens", folder.root / "probe"
    tokens.mkdir()
    probes.mkdir()
    for step in (0, 4, 999_999, 1_000_000):
        folder.evals(step).mkdir(parents=True)
        write_rollouts(folder.root, step, [])
        (tokens / table_name(step)).touch()
        step_file(probes, step).touch()
    (folder.root / "evals" / "step_by_hand").mkdir()
    (rollouts / "step_by_step.parquet").touch()
    before = {path.relative_to(folder.root) for path in folder.root.rglob("*step_*")}
    folder.supersede_steps(999_999)
    kept = ["step_000000", "step_000004", "step_999999"]
    assert sorted(path.name for path in (tmp_path / "run" / "evals").iterdir()) == [*kept, "step_by_hand"]
    folder.supersede_steps(4)
    folder.close()
    aside = tmp_path / "run" / "superseded" / "attempt_1"
    assert len(list(aside.rglob("*step_*"))) == 2 * (len(before) - 2) // 4
    assert {path.relative_to(folder.root) for path in folder.root.rglob("*step_*") if aside not in path.parents} | {
        path.relative_to(aside) for path in aside.rglob("*step_*")
    } == before
    assert sorted(path.name for path in (tmp_path / "run" / "evals").iterdir()) == [*kept[:2], "step_by_hand"]
    assert sorted(path.stem for path in rollouts.iterdir()) == [*kept[:2], "step_by_step"]
    assert sorted(path.stem for path in probes.iterdir()) == kept[:2]
    assert sorted(path.stem for path in tokens.iterdir()) == kept[:2]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Another process holds it; a process that was killed does not."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from megasharp.checkpoint.run_folder import open_run\n"
        "held = open_run(Path(sys.argv[1]), 'held', resume=False)\nprint('ready', flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-B", "-c", script, str(tmp_path / "a")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            with pytest.raises(UserError, match="a: another process is running this run"):
                open_run(tmp_path / "a", "mine", resume=True)
            assert (tmp_path / "a/config.yaml").read_text() == "held"
        finally:
            holder.kill()
    open_run(tmp_path / "a", "mine", resume=True).close()


def test_who_only_looks_at_a_run_keeps_nobody_from_it(tmp_path: Path) -> None:
    """`runs show` holds the lock for a moment, to see whether anybody else does."""
    open_run(tmp_path / "a", "", resume=True).close()
    with (tmp_path / "a/.lock").open() as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (looked, fcntl.LOCK_UN)).start()
        open_run(tmp_path / "a", "", resume=True).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot make the run folder") as refused:
        open_run(tmp_path / "file" / "run", "", resume=False)
    assert "\n" not in str(refused.value)


def test_a_run_whose_logs_were_deleted_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for _ in range(2):
        open_run(root, "", resume=True).close()
    recorded(root, 1)
    with_a_checkpoint(root)
    shutil.rmtree(root / "logs/attempt_1")
    third = open_run(root, "", resume=True)
    third.close()
    assert (third.attempt, third.resumed) == (3, True)
    shutil.rmtree(root / "logs")
    again = open_run(root, "", resume=True)
    again.close()
    assert (again.attempt, again.resumed) == (1, True)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As Lustre is where it was mounted without them."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"\.lock: the file system cannot lock files .*; choose another") as refused:
        open_run(tmp_path / "a", "", resume=False)
    assert "\n" not in str(refused.value)
