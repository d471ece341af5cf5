"""A mixture in real runs: two sources with judges and limits of their own, and another mixture in the next stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quickstart import REPOSITORY, Command

JUDGE = "def brief(text, answer):\n    return 1.0 if len(text) < len(answer) + 3 else 0.25\n"
PROBLEMS = REPOSITORY / "examples" / "quickstart" / "data" / "train.jsonl"
SAME = ("policy/loss", "policy/grad_norm", "rollout/tokens", "group/numbers/prompts", "group/own/prompts")


def mixture(folder: Path) -> list[str]:
    """Overrides of the quickstart by a mixture of its own problems and of rows that a function judges."""
    (folder / "judging.py").write_text(JUDGE)
    rows = [{"sum": f"{number} {number}=", "answer": str(2 * number)} for number in range(1, 8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    numbers = f"{{source: numbers, task: countdown, path: {PROBLEMS}, size: 50, weight: 3}}"
    own = (
        f"{{source: own, path: {folder / 'rows.jsonl'}, prompt_key: sum, weight: 1, responses_per_prompt: 2, "
        f"reward: '{folder / 'judging.py'}:brief', max_response_tokens: 5}}"
    )
    stage = "{until: 2, max_response_tokens: 8, responses_per_prompt: 3, weights: {numbers: 1, own: 1}}"
    return [
        *("data.task=null", "data.path=null", f"data.mix=[{numbers}, {own}]", f"data.stages=[{stage}]"),
        *("data.responses_per_prompt=4", "reward.workers=0", "checkpoint.every=1"),
        # Groups that it drops are replaced, so that steps end within a block.
        "recipe.methods=[grpo,dynamic_sampling]",
    ]


@pytest.mark.long("saves")
def test_a_mixture_in_two_halves_trains_what_a_whole_one_does(command: Command, tmp_path: Path) -> None:
    mixed = mixture(tmp_path)
    out = command.run(*command.train(*mixed, "steps=4", "name=whole"))
    command.run(*command.train(*mixed, "steps=3", "name=halves"))
    command.run(*command.train(*mixed, "steps=4", "name=halves", "--resume"))
    whole, halves = command.rows("whole"), command.rows("halves")
    assert [[row[key] for key in SAME] for row in halves] == [[row[key] for key in SAME] for row in whole]
    assert "step 3: responses of up to 20 tokens; 4 to a prompt; sources by numbers 3, own 1: step 2 is done" in out
    both = [
        json.loads((command.runs / name / "checkpoints" / "step_000004" / "manifest.json").read_text())
        for name in ("whole", "halves")
    ]
    assert both[0]["sources"] == both[1]["sources"] and both[0]["cursor"] == both[1]["cursor"]
    assert sum(source["left"] for source in both[0]["sources"]) > 0, "the last step ended within a block"
    for row in whole:
        asked = row["group/numbers/prompts"] / row["group/own/prompts"]
        assert 0.5 < asked < 2 if row["step"] <= 2 else 2 < asked < 5
        assert row["rollout/own/length_mean"] <= 5 and 0.25 <= row["reward/own/mean"] <= 1
        assert ("group/numbers/pass@4" in row) == (row["step"] > 2)
        assert "group/own/pass@2" in row and "group/own/pass@4" not in row


def test_a_dry_run_tells_the_share_the_judge_and_the_limits_of_each_source(command: Command, tmp_path: Path) -> None:
    out = command.run(*command.train(*mixture(tmp_path), "name=dry", "--dry-run"))
    assert "  numbers: 50 prompts of countdown, 50 %, then 75 % of a step, judged by countdown\n" in out
    own = f"50 %, then 25 % of a step, judged by {tmp_path / 'judging.py'}:brief, <= 5 tokens, 2 responses\n"
    assert own in out
    assert "step       8 prompts x 4 = 32 responses at most" in out and "\nprompt     own: 1 1= (" in out
