"""A sweep as an array of a real Slurm: each job is one run, and one whose time is up queues itself again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cluster import Cluster, wait_for
from submitting import QUICKSTART, REPOSITORY
from waiting import HANG_S

pytestmark = pytest.mark.long("slurm")

GRID = """
name: study
run: {run}
seeds: [1, 2]
set:
  data: {{prompts_per_step: 8}}
  log: {{tensorboard: false}}
  eval: {{every: 0, suites: []}}
  checkpoint: {{every: 5}}
  steps: 60
slurm: {{time: "5", lead: 30, cpus_per_node: 1, at_once: 2}}
"""


def test_an_array_runs_each_seed_and_one_that_is_warned_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.format(run=QUICKSTART))
    command = (sys.executable, "-P", "-m", "megasharp.cli", "sweep", str(grid), "--slurm")
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    found = re.match(r"submitted array (\d+): 2 of 2 runs", slurm.call(*command, environment=environment, cwd=tmp_path))
    assert found
    folder, number = tmp_path / "runs" / "study", found[1]

    def steps(seed: int) -> list[int]:
        metrics = folder / f"study_s{seed}" / "metrics.jsonl"
        rows = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        return [row["step"] for row in rows if "policy/loss" in row]

    def log(task: int) -> str:
        path = folder / "logs" / f"{number}_{task}.log"
        return path.read_text() if path.exists() else ""

    wait_for(lambda: len(steps(2)) > 3, HANG_S, lambda: log(1))
    slurm.call("scancel", "--batch", "--signal=USR1", f"{number}_1")
    ended = [slurm.ended(f"{number}_{task}", 400) for task in (0, 1)]
    assert [(done.state, done.exit_code) for done in ended] == [("COMPLETED", 0)] * 2, (log(0), log(1))
    assert ended[1].restarts == 1 and "time is nearly up" in log(1) and "time is nearly up" not in log(0)
    assert steps(1) == steps(2) == list(range(1, 61))
    said = slurm.call(*command, environment=environment, cwd=tmp_path)
    assert said.startswith("study: nothing to submit")
