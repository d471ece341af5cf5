"""examples/bring_your_own as its README has it: an own data set and reward train a Qwen-like and a Llama-like model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bring_your_own"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stranger: the example's files, and what `make.py` writes."""
    copy = tmp_path_factory.mktemp("stranger") / "own"
    shutil.copytree(EXAMPLE, copy)
    python(copy, "make.py")
    return copy


def python(folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        pytest.param("qwen", "<|im_start|>user⏎", marks=pytest.mark.long("runs")),
        pytest.param("llama", "<|begin_of_text|><|start_header_id|>user<|end_", marks=pytest.mark.long("examples")),
    ],
)
def test_the_reward_rises(model: str, prompt: str, folder: Path) -> None:
    out = python(folder, "-m", "megasharp.cli", "train", "run.yaml", f"name={model}", f"model.path={model}")
    assert f"prompt     {prompt}" in out
    rows = [json.loads(line) for line in (folder / "runs" / model / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 20
    # Measured: 0.02 to 0.36.
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])
