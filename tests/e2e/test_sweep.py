"""A sweep of real runs: stopped in the middle and gone on with, its table, and mistakes before anything starts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from quickstart import REPOSITORY, Command
from waiting import HANG_S, wait_until

from megasharp.common.files import held

GRID = """
name: study
run: {run}
seeds: [1]
set:
  data: {{prompts_per_step: 8}}
  log: {{tensorboard: false}}
  eval: {{every: 0, suites: [countdown_dev], n: 2, k: [1, 2]}}
  steps: 2
cases:
  plain: {{}}
  bonus: {{set: {{recipe.methods: [grpo, entropy_bonus], steps: {steps}}}}}
results: {{k: [1, 2], before: plain, against: plain}}
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID.format(run=REPOSITORY / "examples" / "quickstart" / "run.yaml", steps=60))
    return path


@pytest.mark.long("runs")
def test_a_sweep_goes_on_where_it_was_stopped(command: Command, grid: Path) -> None:
    arguments = ("sweep", str(grid), "--runs", str(command.runs))
    process = command.start(*arguments)
    folder = command.runs / "study"
    metrics = folder / "bonus_s1" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 3))
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 143
    assert command.run(*arguments, "--dry-run").split("\n")[:2] == ["plain_s1: finished", "bonus_s1: to do"]
    text = command.run(*arguments, "--results")
    assert text.startswith("**Partial: 1 of 2 runs are finished.**")
    grid.write_text(grid.read_text().replace("steps: 60", "steps: 3"))
    command.run(*arguments)
    assert "attempt_2" in {path.name for path in (folder / "bonus_s1" / "logs").iterdir()}
    line = command.run(*arguments, "set.policy.optimizer.lr=1.0e-5", code=2)
    assert "plain_s1" in line and line.rstrip().endswith("or give the case, or the sweep, another name")
    before = (folder / "files" / "plain_s1.yaml").read_text()
    line = command.run(*arguments, "--results", "set.policy.optimizer.lr=1.0e-5", code=2)
    assert "plain_s1" in line and "policy.optimizer.lr was" in line
    assert (folder / "files" / "plain_s1.yaml").read_text() == before
    assert command.run(*arguments, "--dry-run", "set.steps=4").split("\n")[:2] == [
        "plain_s1: to do",
        "bonus_s1: finished",
    ]
    line = command.run(*arguments, "set.eval.n=4", code=2)
    assert "eval.n was 2 and is now 4, and the run is finished" in line
    assert "results.k: [8] is not in eval.k ([1, 2])" in command.run(*arguments, "results.k=[1,8]", code=2)
    text = command.run(*arguments, "--results", "--out", str(folder / "table"))
    assert "Partial" not in text and "| `base` |" in text and "Minus `plain`" in text
    assert (folder / "table" / "pass_at_k.png").is_file()


@pytest.mark.long("runs")
def test_one_command_at_a_time_runs_a_grid(command: Command, grid: Path) -> None:
    with held(command.runs / "study", ""):
        line = command.run("sweep", str(grid), "--runs", str(command.runs), code=2)
    assert line.rstrip().endswith("study: another megasharp sweep runs this grid")


@pytest.mark.long("runs")
def test_a_mistake_in_the_last_run_is_told_before_the_first_begins(command: Command, grid: Path) -> None:
    grid.write_text(grid.read_text().replace("entropy_bonus]", "entropy_bonsu]"))
    line = command.run("sweep", str(grid), "--runs", str(command.runs), code=2)
    assert len(line.splitlines()) == 1 and "bonus_s1" in line and "entropy_bonsu" in line
    assert not (command.runs / "study" / "plain_s1").exists()
