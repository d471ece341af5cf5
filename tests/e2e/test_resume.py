"""A stopped and resumed run equals an uninterrupted one bit for bit; the matrix of it is in tests/long."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from matrix import Cell, run, table
from quickstart import REPOSITORY, Command


@pytest.mark.long("saves")
def test_a_killed_run_goes_on_bit_for_bit_at_an_epochs_end(command: Command, tmp_path: Path) -> None:
    """Two steps are an epoch, so the first prompt after the resume is the first of the next one."""
    data = tmp_path / "data.jsonl"
    lines = (REPOSITORY / "examples/quickstart/data/train.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines[:8]))
    found = run(command, Cell("tp1, end of an epoch", signal.SIGKILL, (f"data.path={data}",)))
    print(table([found]))
    assert found.holds and found.after % 2 == 0, table([found])
