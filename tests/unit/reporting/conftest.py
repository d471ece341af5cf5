"""Makes the helpers of this folder importable, and gives each test a run's folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run_folders import Folder


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    """A run's folder, with nothing in it yet."""
    return Folder(tmp_path / "runs" / "mine")
