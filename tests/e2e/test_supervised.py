"""`megasharp train --retries` with a real run: a rank that is killed costs an attempt, not the run."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from quickstart import Command
from waiting import HANG_S, SOON_S

from megasharp.checkpoint.attempts import read_attempts

STEPS = 12


@pytest.mark.long("runs")
def test_a_killed_rank_costs_an_attempt(command: Command) -> None:
    options = (f"steps={STEPS}", "name=a", "policy.tp=2", "checkpoint.every=2")
    process = command.start(*command.train(*options), "--retries", "2")
    run = command.runs / "a"
    record, latest = run / "logs/attempt_1/rank_1.process", run / "checkpoints/latest"
    deadline = time.monotonic() + HANG_S
    while not latest.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, error
    lines = error.splitlines()
    assert "rank 1 ended with exit code -9" in lines[0]
    assert lines[1].startswith("megasharp: note: rank 1 ended") and "(restart 1 of 2)" in lines[1]
    attempts = read_attempts(run / "logs")
    assert [attempt and attempt.exit_code for attempt in attempts.values()] == [1, 0]
    assert attempts[2] is not None and attempts[2].from_step >= 2
    assert [row["step"] for row in command.rows("a")] == list(range(1, STEPS + 1))
    assert psutil.wait_procs(family, timeout=SOON_S)[1] == []
