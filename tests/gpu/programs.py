"""Runs `learner_program.py` in a process of its own, on a small model that kernels of 8 bits can take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from policies import save_model

PROGRAM = Path(__file__).with_name("learner_program.py")
# Multiples of 128, by which FP8's blocks are counted.
SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
}


def small_model(folder: Path) -> str:
    """Written as transformers does; its path."""
    return save_model(folder, "qwen3", **SIZES)


def run(model: str, **given: Any) -> dict[str, Any]:
    """What the program found with these settings; its error output where it failed."""
    root = Path(__file__).parents[2]
    folders = ("", "tests/multirank", "tests/multirank/learner", "tests/unit/learner")
    places = [str(root / folder) for folder in folders]
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), model, json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
