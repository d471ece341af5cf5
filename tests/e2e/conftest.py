"""Makes the helpers of this folder importable, and gives each test a command of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from quickstart import Command


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`megasharp` with run folders below a temporary one."""
    return Command(tmp_path / "runs")
