"""Makes the helpers of this folder importable, and gives each test a command of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nursery import Nursery
from quickstart import Command


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that commands are forked from."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def command(tmp_path: Path, nursery: Nursery) -> Command:
    """`megasharp` with run folders below a temporary one."""
    return Command(tmp_path / "runs", nursery)
