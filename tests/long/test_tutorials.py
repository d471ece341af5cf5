"""The tutorials' mistakes are answered as their pages say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "tutorials" / "own-model-data-reward.md"
# A row of its table: the override in backquotes at the end of the first cell, the message as code in the second.
ROW = re.compile(r"^\| [^|`]*: `([\w.]+=\S+)` \| (`+)(.+)\2 \|$", re.MULTILINE)


@pytest.mark.long("examples")
def test_mistakes_with_own_models_data_and_rewards(tmp_path: Path) -> None:
    own = shutil.copytree(REPOSITORY / "examples" / "bring_your_own", tmp_path / "own")
    subprocess.run([sys.executable, "make.py"], cwd=own, check=True)
    command = [sys.executable, "-m", "megasharp.cli", "train", "run.yaml", "--dry-run"]
    answers = {}
    for override, _, message in ROW.findall(PAGE.read_text(encoding="utf-8")):
        done = subprocess.run([*command, override], cwd=own, capture_output=True, text=True, check=False)
        begin, _, end = message.partition("...")
        last = done.stderr.splitlines()[-1]
        answers[override] = done.returncode == 2 and last.startswith(f"megasharp: {begin}") and last.endswith(end)
    assert len(answers) >= 9 and all(answers.values()), answers
