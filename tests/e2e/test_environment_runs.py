"""Runs with an environment: of one turn they are the task's own runs, and of many they resume bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from matrix import Cell, run, table
from quickstart import QUICKSTART, REPOSITORY, SMALL, Command

from megasharp.config.run_config import load_run
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.run import train

ONE_TURN = """
from megasharp.tasks.countdown import CountdownAnswer, prompt_text, verify
from megasharp.tasks.environment import Environment, Observation


class Countdown(Environment):
    async def reset(self, row):
        self.answer = CountdownAnswer(tuple(row["numbers"]), row["target"])
        return Observation(prompt_text(row["numbers"], row["target"]))

    async def step(self, action):
        verdict = verify(action, self.answer)
        return Observation(reward=verdict.reward, done=True, info={"answer": verdict.canonical_answer})
"""
# Seconds, speeds and memory; what only episodes have; and what the environment does not know: kinds of wrong answers,
# and how many right ones there are.
OTHERWISE = (
    *("time", "update/", "mem/", "rollout/tokens_per_second"),
    *("rollout/turn", "rollout/environment", "rollout/context_max", "eval/dev/turns"),
    *("reward/outcome_format", "reward/outcome_wrong", "eval/dev/solutions_found", "eval/dev/multiplicity"),
)
MAZE = (
    "name=maze",
    "model.path=examples/maze/base",
    "data.task=maze",
    "data.path=examples/maze/data/train.jsonl",
    "data.max_prompt_tokens=24",
    "data.max_response_tokens=40",
    "rollout.episodes={max_turns: 10}",
)


def rows(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train for three steps of two updates; returns what metrics.jsonl says of them."""
    options = ("steps=3", "data.prompts_per_step=16", "recipe.mini_batches=2", "policy.optimizer.warmup_steps=0")
    resolved = check(load_run(REPOSITORY / QUICKSTART, [*SMALL, *options, *overrides]), QUICKSTART)
    train(resolved, folder, resume=False, say=lambda line: None)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(OTHERWISE)} for line in lines]


@pytest.mark.long("runs")
def test_a_task_is_an_environment_of_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same responses, rewards, losses, gradients, evaluations and probes to the last digit, by three methods."""
    monkeypatch.chdir(REPOSITORY)
    lines = (REPOSITORY / "examples/quickstart/data/train.jsonl").read_text().splitlines()[:48]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    (tmp_path / "own_countdown.py").write_text(ONE_TURN)
    (tmp_path / "problems.yaml").write_text("use: own_countdown.py:Countdown\nrows: problems.jsonl\n")
    found = []
    for task, problems in (("countdown", "problems.jsonl"), ("environment", "problems.yaml")):
        suite = tmp_path / task / "suites" / "dev.yaml"
        suite.parent.mkdir(parents=True)
        suite.write_text(f"task: {task}\npath: ../../{problems}\n")
        options = (f"data.task={task}", f"data.path={tmp_path / problems}", "recipe.methods=[dapo,casp,iac]")
        evaluated = ("eval.every=3", f"eval.suites=[{suite}]", "eval.n=2", "eval.k=[1,2]", "eval.probe=4")
        found.append(rows(tmp_path / task / "run", *options, *evaluated))
    assert len([line for line in found[0] if line.get("policy/grad_norm")]) == 3
    assert len([line for line in found[0] if "eval/dev/pass@2" in line]) == 2
    assert found[1] == found[0]
    read, played = (
        pq.read_table(tmp_path / task / "run/probe/step_000003.parquet") for task in ("countdown", "environment")
    )
    assert played.equals(read)


@pytest.mark.long("saves")
def test_a_killed_run_of_many_turns_goes_on_bit_for_bit(command: Command) -> None:
    found = run(command, Cell("maze, ten turns", signal.SIGKILL, MAZE))
    print(table([found]))
    assert found.holds, table([found])
