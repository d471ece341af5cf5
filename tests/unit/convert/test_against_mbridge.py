"""The mapping between Hugging Face and Megatron against an independent converter, mbridge: a program of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

TOOL = Path(__file__).resolve().parents[3] / "tools" / "compare_with_mbridge.py"


@pytest.mark.long("ranks")
def test_every_parameter_is_what_mbridge_makes_of_the_checkpoint() -> None:
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False, timeout=HANG_S)
    found = re.findall(r"^(\w+(?:, tied)?): (\d+) parameters and settings, (\d+) differ$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert [name for name, _, _ in found] == [
        "qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "qwen2, tied", "qwen3, tied",
    ]  # fmt: skip
    assert all(int(compared) > 20 and int(differ) == 0 for _, compared, differ in found), done.stdout
