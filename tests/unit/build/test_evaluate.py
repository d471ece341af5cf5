"""`megasharp eval` as a process: where its results go, and what SIGUSR1 does to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasharp.build.measured import check_measurable, measured
from megasharp.errors import UserError
from megasharp.signals import save_kept_from_children

BASE = Path(__file__).parents[3] / "examples" / "quickstart" / "base"
_LIMIT_S = 400.0


def started(out: Path, samples: int) -> subprocess.Popen[str]:
    """As a job's node starts it: SIGUSR1 is held back until it is heard."""
    asked = ["--n", str(samples), "--k", "1", "--max-tokens", "4", "--out", str(out)]
    with save_kept_from_children():
        return subprocess.Popen(
            [sys.executable, "-m", "megasharp.cli", "eval", str(BASE), *asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Both outputs."""
    try:
        return process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()


def test_results_lie_under_the_name_of_what_is_measured(tmp_path: Path) -> None:
    process = started(tmp_path / "{checkpoint}", 1)
    said, errors = ended(process)
    assert process.returncode == 0, errors
    file = tmp_path / "base" / "countdown_test.json"
    assert f"wrote {file}" in said and json.loads(file.read_text())["label"] == "base"


@pytest.mark.parametrize("wait_s", [0.0, 8.0])
def test_a_warning_ends_an_evaluation_in_one_line_and_it_is_not_queued_again(tmp_path: Path, wait_s: float) -> None:
    """At the start, when it is not heard yet, and on the way."""
    process = started(tmp_path / "out", 100_000)
    time.sleep(wait_s)
    process.send_signal(signal.SIGUSR1)
    _, errors = ended(process)
    assert process.returncode == 1, errors
    assert "SIGUSR1 (time is nearly up) ended the evaluation on countdown_test, of which nothing can be kept" in errors
    assert "Traceback" not in errors and not (tmp_path / "out").exists()


def test_what_can_be_measured(tmp_path: Path) -> None:
    check_measurable(BASE)
    assert measured(BASE) == BASE
    (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(UserError, match="run: neither a run with a checkpoint, nor a checkpoint, nor a Hugging Face"):
        measured(tmp_path / "run")
