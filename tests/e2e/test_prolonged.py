"""Resets on stagnation and stages of response length in real runs: stopped and resumed, they come at the same steps."""

from __future__ import annotations

import json

import pytest
from quickstart import Command

# A rate of nearly zero: evaluations with the same seeds give the same figures, so the metric stagnates.
STAGNANT = (
    "eval.suites=[countdown_dev]",
    "eval.every=1",
    "eval.n=2",
    "eval.k=[1,2]",
    "recipe.methods=[grpo,kl]",
    "recipe.reset.stagnation={metric: eval/countdown_dev/pass@1, patience: 2, min_improvement: 0.05}",
    "data.stages=[{until: 3, max_response_tokens: 8}]",
    "policy.optimizer.lr=1.0e-9",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=eval/countdown_dev/pass@1",
)
SAME = ("policy/reset", "rollout/length_limit", "policy/loss", "policy/grad_norm", "rollout/tokens")


@pytest.mark.long("saves")
def test_a_run_in_two_halves_resets_and_lengthens_at_the_steps_of_a_whole_one(command: Command) -> None:
    out = command.run(*command.train(*STAGNANT, "steps=5", "name=whole"))
    # Stopped where a reset is decided by the evaluation after the last checkpoint, and not carried out.
    command.run(*command.train(*STAGNANT, "steps=2", "name=halves"))
    command.run(*command.train(*STAGNANT, "steps=5", "name=halves", "--resume"))
    whole, halves = command.rows("whole"), command.rows("halves")
    assert [row["policy/reset"] for row in whole] == [0, 0, 1, 0, 1]
    assert [row["rollout/length_limit"] for row in whole] == [8, 8, 8, 20, 20]
    assert max(row["rollout/length_max"] for row in whole[:3]) <= 8 < whole[4]["rollout/length_max"]
    # Evaluations have the largest limit in every stage, so that their figures compare.
    lines = map(json.loads, (command.runs / "whole" / "metrics.jsonl").read_text().splitlines())
    lengths = [row[key] for row in lines if (key := "eval/countdown_dev/length_mean") in row]
    assert len(lengths) == 6 and min(lengths) > 8
    assert [[row[key] for key in SAME] for row in halves] == [[row[key] for key in SAME] for row in whole]
    assert "step 3: reference and optimizer reset first: eval/countdown_dev/pass@1 is" in out
    assert "step 4: responses of up to 20 tokens: step 3 is done" in out
    both = [
        json.loads((command.runs / name / "checkpoints" / "step_000005" / "manifest.json").read_text())["control"]
        for name in ("whole", "halves")
    ]
    assert both[0] == both[1]
    shown = command.run("runs", "show", str(command.runs / "halves"))
    assert "finished  step 5 of 5, 100%" in shown and "1 restart\n" in shown and "after step 2 (eval/" in shown
    assert [reset["step"] for reset in both[0]["resets"]["done"]] == [2, 4]
    best = both[0]["best"]["eval/countdown_dev/pass@1"]["step"]
    assert sorted(path.name for path in (command.runs / "whole" / "checkpoints").glob("step_*")) == [
        f"step_{step:06d}" for step in sorted({best, 5})
    ]


@pytest.mark.long("runs")
def test_a_budget_of_tokens_ends_a_run_with_its_evaluation_and_summary(command: Command) -> None:
    asked = ("eval.suites=[countdown_dev]", "eval.every=0", "eval.at_start=false", "eval.n=2", "eval.k=[1,2]")
    command.run(*command.train("steps=2", "name=before"))
    tokens = int(sum(row["rollout/tokens"] for row in command.rows("before"))) + 1
    command.run(*command.train(*asked, "steps=9", f"token_budget={tokens}", "checkpoint.every=1", "name=budget"))
    folder = command.runs / "budget"
    assert [row["step"] for row in command.rows("budget")] == [1, 2, 3]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert [path.name for path in (folder / "evals").iterdir()] == ["step_000003"]
    assert "finished  step 3 of 9 at most" in command.run("runs", "show", str(folder))
    command.run(*command.train(*asked, "steps=9", f"token_budget={tokens}", "name=budget", "--resume"))
    assert len(command.rows("budget")) == 3


@pytest.mark.long("runs")
def test_a_metric_that_no_evaluation_gives_is_one_line(command: Command) -> None:
    line = command.run(*command.train(*STAGNANT, "checkpoint.keep_best=reward/mean", "name=bad"), code=2)
    assert len(line.splitlines()) == 1 and "checkpoint.keep_best: no evaluation gives 'reward/mean'" in line
