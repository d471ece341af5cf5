"""`megasharp eval` cut off twice, by SIGUSR1 and by SIGKILL, gives the files of one that nothing happened to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import HANG_S

from megasharp.common.signals import save_kept_from_children

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "quickstart" / "base"

pytestmark = pytest.mark.long("saves")


def suite_of_forty(folder: Path) -> Path:
    """Forty of the quickstart's problems."""
    lines = (ROOT / "examples" / "quickstart" / "data" / "test.jsonl").read_text().splitlines()[:40]
    (folder / "forty.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "forty.yaml").write_text("task: countdown\npath: forty.jsonl\n")
    return folder / "forty.yaml"


def started(out: Path, suite: Path) -> subprocess.Popen[str]:
    """As a job's node starts it: SIGUSR1 is held back until it is heard."""
    asked = ["--suite", str(suite), "--n", "1000", "--k", "1,1000", "--max-tokens", "4", "--out", str(out)]
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
        return process.communicate(timeout=HANG_S)
    finally:
        process.kill()


def chunks(out: Path) -> list[Path]:
    return sorted((out / "forty.samples").glob("*.parquet"))


def cut_off(out: Path, suite: Path, number: signal.Signals, at_chunks: int) -> tuple[int, str]:
    """Start an evaluation, send it a signal when so many chunks are there; its exit code and what it said last."""
    process = started(out, suite)
    deadline = time.monotonic() + HANG_S
    while len(chunks(out)) < at_chunks and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = ended(process)
    return process.returncode, errors


def test_an_evaluation_goes_on_after_a_warning_and_a_kill_to_the_same_figures(tmp_path: Path) -> None:
    """Six chunks: asked to end after two, killed after four, then finished; beside one that nothing happened to."""
    cut, whole, suite = tmp_path / "cut", tmp_path / "whole", suite_of_forty(tmp_path)
    code, errors = cut_off(cut, suite, signal.SIGUSR1, 2)
    assert code == 75 and "samples of the present suite are kept; the same command goes on" in errors, errors
    kept = {path: path.stat().st_mtime_ns for path in chunks(cut)}
    assert len(kept) >= 2
    code, errors = cut_off(cut, suite, signal.SIGKILL, len(kept) + 2)
    assert code == -signal.SIGKILL, errors
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for out in (cut, whole):
        process = started(out, suite)
        _, errors = ended(process)
        assert process.returncode == 0, errors
    trees = [json.loads((out / "forty.json").read_text()) for out in (cut, whole)]
    for tree in trees:
        assert tree.pop("seconds") > 0
    assert trees[0] == trees[1]
    assert (cut / "forty.parquet").read_bytes() == (whole / "forty.parquet").read_bytes()
    assert not (cut / "forty.samples").exists()
