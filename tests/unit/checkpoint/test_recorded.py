"""Where steps were recorded and their checkpoints are missing, a run is not begun again, and nothing is deleted."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case

from megasharp.checkpoint import run_folder
from megasharp.checkpoint.attempts import ATTEMPT_FILE, AttemptLog
from megasharp.checkpoint.run_folder import open_run
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.errors import UserError
from megasharp.evals.probe import step_file
from megasharp.metrics.response_table import write_rollouts
from megasharp.metrics.writers import MetricLog, read_metrics
from tests.unit.saving import save_at_once

CONFIG = "checkpoint:\n  every: 50\n"


def begun(root: Path) -> AttemptLog:
    """A run whose first attempt was killed before its first step."""
    folder = open_run(root, CONFIG, resume=False)
    attempt = AttemptLog(folder.logs)
    folder.checkpoints.mkdir()
    folder.close()
    return attempt


def rows(root: Path, last: int, saved: int | None = None) -> None:
    log = MetricLog(root, tensorboard=False, resumed_step=None)
    for step in range(1, last + 1):
        log.write(step, {"time/step": 1.0})
        if step == saved:
            log.write(step, {"time/checkpoint": 1.0})
    log.close()


def content(root: Path) -> dict[Path, bytes | None]:
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def refusal(root: Path) -> str:
    """Of a resume, which leaves everything as it was."""
    before = content(root)
    with pytest.raises(UserError) as refused:
        open_run(root, CONFIG, resume=True)
    assert content(root) == before and "\n" not in str(refused.value)
    return str(refused.value)


def responses(root: Path) -> None:
    write_rollouts(root, 120, [])


def an_evaluation(root: Path) -> None:
    (root / "evals" / "step_000120").mkdir(parents=True)


def a_probe(root: Path) -> None:
    (root / "probe").mkdir()
    step_file(root / "probe", 120).touch()


def latest(root: Path) -> None:
    (root / "checkpoints" / "latest").write_text("step_000120\n")


def damaged(root: Path) -> None:
    (root / "checkpoints" / "damaged_step_000120").mkdir()


def without_a_manifest(root: Path) -> None:
    (root / "checkpoints" / "step_000120" / "policy").mkdir(parents=True)


@each_case(
    ("left", "sign"),
    [
        (lambda root: rows(root, 120), "metrics.jsonl has rows up to step 120"),
        (responses, "rollouts/ has step 120"),
        (an_evaluation, "evals/ has step 120"),
        (a_probe, "probe/ has step 120"),
        (latest, "checkpoints/latest names step_000120"),
        (damaged, "checkpoints/ has damaged_step_000120"),
        (without_a_manifest, "checkpoints/ has step_000120"),
        (lambda root: None, "attempt 1 came to step 100"),
    ],
)
def test_each_sign_of_a_saved_step_refuses_a_resume(tmp_path: Path, left: Callable[[Path], None], sign: str) -> None:
    root = tmp_path / "a"
    attempt = begun(root)
    attempt.saved(100)
    left(root)
    said = refusal(root)
    assert sign in said and "attempt 1 came to step 100" in said
    assert f"{root}/checkpoints holds no complete checkpoint; bring the checkpoints back" in said
    assert said.endswith("or begin anew with --start-over, which moves the folder aside")
    with pytest.raises(UserError, match="this run exists"):
        open_run(root, CONFIG, resume=False)


def test_a_checkpoints_folder_that_is_not_there_refuses_a_resume_though_nothing_was_saved(tmp_path: Path) -> None:
    """As where a link is not mounted; the line says where it leads."""
    root = tmp_path / "a"
    begun(root)
    rows(root, 3)
    (root / "checkpoints").rmdir()
    assert f"but {root}/checkpoints is not there; bring" in refusal(root)
    (root / "checkpoints").symlink_to(tmp_path / "scratch")
    assert f"but {root}/checkpoints is a link to {tmp_path}/scratch, which is not there; bring" in refusal(root)
    (root / "metrics.jsonl").unlink()
    assert "a: the run was begun; but" in refusal(root), "the next checkpoint would have no place"


def test_a_run_that_never_came_to_a_checkpoint_begins_again_by_itself(tmp_path: Path) -> None:
    """Killed at step 3 of checkpoint.every 50, in the middle of its first save, and before its record was written."""
    root = tmp_path / "a"
    begun(root)
    rows(root, 3)
    (root / "checkpoints" / ".step_000003.partial").mkdir()
    (root / "logs" / "attempt_2").mkdir()
    (root / "logs" / "attempt_2" / "config.yaml").write_text(CONFIG)
    folder = open_run(root, CONFIG, resume=True)
    folder.close()
    assert folder.note == (
        "no checkpoint was complete yet, so the run begins again at step 1 (metrics.jsonl has rows up to step 3)"
    )
    assert (folder.attempt, folder.resumed) == (3, True)
    (root / "logs" / "attempt_2" / "rank_0.log").touch()
    assert "no complete checkpoint" in refusal(root), "an attempt of which nothing is known may have saved"


@each_case(
    ("last", "saved", "record", "begins"),
    [
        (49, None, {}, True),
        (50, None, {}, False),
        (30, 20, {}, False),
        (3, None, {"from_step": 40}, False),
        (3, None, {"last_step": 60}, False),
    ],
)
def test_a_record_of_before_saved_step_counts_where_no_save_can_have_been(
    tmp_path: Path, last: int, saved: int | None, record: dict[str, int], begins: bool
) -> None:
    root = tmp_path / "a"
    begun(root)
    path = root / "logs" / "attempt_1" / ATTEMPT_FILE
    tree = json.loads(path.read_text())
    del tree["saved_step"]
    path.write_text(json.dumps({**tree, **record}))
    rows(root, last, saved)
    if begins:
        open_run(root, CONFIG, resume=True).close()
    else:
        assert f"rows up to step {last}" in refusal(root)


def test_a_complete_checkpoint_is_enough(tmp_path: Path) -> None:
    root = tmp_path / "a"
    attempt = begun(root)
    rows(root, 120)
    store = CheckpointStore(root / "checkpoints", 1, None, attempt.saved)
    save_at_once(store, RunState("base", step=100), lambda folder: None)
    assert attempt.record.saved_step == 100
    folder = open_run(root, CONFIG, resume=True)
    folder.close()
    assert folder.note is None and folder.resumed


def test_starting_over_keeps_the_old_folder_under_a_name_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    for times in (1, 2, 3):
        attempt = begun(root)
        attempt.saved(100)
        rows(root, times)
        before = content(root)
        folder = open_run(root, CONFIG, resume=False, start_over=True)
        folder.close()
        assert folder.note is not None and folder.attempt == 1 and not folder.resumed
        moved = Path(folder.note.removeprefix("the old run is now "))
        assert content(moved) == before and moved.name.startswith("a.before_2")
        assert len(list(root.parent.iterdir())) == times + 1 and not (root / "metrics.jsonl").exists()
        shutil.rmtree(root)


def test_a_run_behind_a_link_stays_on_the_file_system_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    root = tmp_path / "a"
    root.symlink_to(tmp_path / "scratch" / "a")
    with pytest.raises(UserError, match=r"a is a link to .*/scratch/a, which is not there; mount it"):
        open_run(root, CONFIG, resume=True)
    (tmp_path / "scratch" / "a").mkdir()
    begun(root)
    rows(root, 1)
    open_run(root, CONFIG, resume=False, start_over=True).close()
    assert root.is_symlink() and (root / "logs" / "attempt_1").is_dir()
    assert len([path for path in (tmp_path / "scratch").iterdir() if path.name.startswith("a.before_2")]) == 1


def test_what_is_no_run_or_is_running_is_not_moved_away(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="thesis: not a run folder, so --start-over leaves it alone"):
        open_run(tmp_path / "thesis", CONFIG, resume=False, start_over=True)
    held = open_run(tmp_path / "a", CONFIG, resume=False)
    with pytest.raises(UserError, match="another process is running this run"):
        open_run(tmp_path / "a", CONFIG, resume=False, start_over=True)
    held.close()
    new = open_run(tmp_path / "b", CONFIG, resume=False, start_over=True)
    new.close()
    assert new.note is None and sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "thesis"]


def test_of_racing_starts_one_gets_the_run_and_the_old_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them start over, half resume: each either holds the new run, or the old one, or is refused."""
    root, winners = tmp_path / "runs" / "a", tmp_path / "winners"
    winners.mkdir()
    attempt = begun(root)
    rows(root, 120)
    save_at_once(CheckpointStore(root / "checkpoints", 1, None), RunState("base", step=100), lambda folder: None)
    attempt.saved(100)
    monkeypatch.setattr(run_folder, "_GLANCE_S", 0.2)
    begin = time.monotonic() + 0.3
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            time.sleep(max(begin - time.monotonic(), 0.0))
            try:
                held = open_run(root, CONFIG, resume=number % 2 == 0, start_over=number % 2 == 1)
                (winners / str(number)).touch()
                time.sleep(1.0)
                held.close()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert len(list(winners.iterdir())) == 1
    old = next((path for path in root.parent.iterdir() if "before" in path.name), root)
    assert [row["step"] for row in read_metrics(old)] == list(range(1, 121))
    assert (old / "checkpoints" / "step_000100" / "manifest.json").is_file()


def test_retention_removes_what_old_attempts_superseded(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "a", CONFIG, resume=False)
    folder.close()
    for number in (2, 9, 10):
        (tmp_path / f"a/superseded/attempt_{number}/evals").mkdir(parents=True)
    folder.prune_superseded(2)
    assert sorted(path.name for path in (tmp_path / "a/superseded").iterdir()) == ["attempt_10", "attempt_9"]
    folder.prune_superseded(0)
    assert list((tmp_path / "a/superseded").iterdir()) == []
