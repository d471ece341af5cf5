"""A run's folder is made once, never overwritten, and held by one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megasharp.checkpoint.run_folder import open_run
from megasharp.errors import UserError


def test_a_new_run(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "runs" / "a", "name: a\n", resume=False)
    assert (tmp_path / "runs/a/config.yaml").read_text() == "name: a\n"
    assert folder.attempt == 1 and folder.logs.is_dir() and folder.logs.name == "attempt_1"
    assert folder.evals(7) == tmp_path / "runs/a/evals/step_000007"
    folder.close()


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    open_run(tmp_path / "a", "old", resume=False).close()
    with pytest.raises(UserError, match="a: this run exists; continue it with --resume"):
        open_run(tmp_path / "a", "new", resume=False)
    assert (tmp_path / "a/config.yaml").read_text() == "old"


def test_resume_counts_attempts(tmp_path: Path) -> None:
    open_run(tmp_path / "a", "one", resume=False).close()
    again = open_run(tmp_path / "a", "two", resume=True)
    assert again.attempt == 2 and again.logs.is_dir() and (tmp_path / "a/config.yaml").read_text() == "two"
    again.close()


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


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot make the run folder") as refused:
        open_run(tmp_path / "file" / "run", "", resume=False)
    assert "\n" not in str(refused.value)
