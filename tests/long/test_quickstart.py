"""The whole quickstart, as `make quickstart` runs it: what the README promises of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.long("examples")
def test_pass_at_1_doubles_within_4_gb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megasharp.cli", "train", "examples/quickstart/run.yaml", "--runs", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    curves = summary["pass_at_k"]["countdown_test"]
    assert curves["after"]["1"] >= 2 * curves["before"]["1"], curves
    assert summary["peak_rss_bytes"] < 4e9
