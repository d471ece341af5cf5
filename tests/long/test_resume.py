"""The matrix of exact resume: N steps are k + (N - k) bit for bit, over layouts, with and without a memory network.

    make test-resume

prints it. What a run that was killed goes on from was saved in the background, what SIGUSR1 asks for is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix import DLC, LONG, Cell, Found, run, table
from nursery import Nursery
from quickstart import Command

pytestmark = [pytest.mark.long("saves"), pytest.mark.timeout(900)]

KILL, SAVE = signal.SIGKILL, signal.SIGUSR1
TP2, PP2 = ("policy.tp=2",), ("policy.pp=2",)
CELLS = (
    Cell("tp1", SAVE),
    Cell("tp2", KILL, TP2),
    Cell("pp2", KILL, PP2),
    Cell("tp1, DLC", KILL, DLC),
    Cell("tp2, DLC", KILL, (*TP2, *DLC)),
    Cell("pp2, DLC", SAVE, (*PP2, *DLC)),
    Cell("cp2, DLC", KILL, ("policy.cp=2", *DLC)),
    Cell("tp1, resets and a stage", KILL, LONG, steps=8, every=4),
)


@pytest.fixture(scope="module")
def found() -> Iterator[list[Found]]:
    """What the cells came to, printed at the end."""
    rows: list[Found] = []
    yield rows
    if rows:
        print("\n" + table(rows))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_stopped_and_resumed_is_the_whole_run(tmp_path: Path, found: list[Found], cell: Cell) -> None:
    found.append(run(Command(tmp_path / "runs", Nursery()), cell))
    assert found[-1].holds, table(found[-1:])
