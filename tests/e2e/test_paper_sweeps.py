"""The papers' sweeps, as a lab starts them: every case for two steps on a stand-in of its model, then the table."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from paper_stand_ins import STAND_INS, prepare, rows_of, sweep_file
from quickstart import REPOSITORY, Command
from waiting import HANG_S

SMALL = (
    "seeds=[1]",
    "set.steps=2",
    "set.model.dtype=float32",
    "set.data.prompts_per_step=4",
    "set.data.max_prompt_tokens=900",
    "set.data.max_response_tokens=8",
    "set.recipe.soft_overlong={max_tokens: 8, cache_tokens: 2}",
    "set.eval.n=2",
    "set.eval.k=[1,2]",
    "set.eval.max_response_tokens=4",
    "results.k=[1,2]",
    f"set.reward.function={REPOSITORY / 'tests/support/parity_reward.py'}:judge",
)


@pytest.mark.long("runs")
@pytest.mark.timeout(4 * HANG_S)
@pytest.mark.parametrize("name", STAND_INS)
def test_every_case_trains_two_steps_and_is_in_the_table(name: str, command: Command, tmp_path: Path) -> None:
    here, found = tmp_path / "here", rows_of(name)
    data = prepare(name, here)
    # In place of the node of GPUs.
    (here / "cpu.yaml").write_text("policy: {device: cpu}\nlog: {tensorboard: false}\n")
    arguments = ["sweep", str(sweep_file(name)), f"run={here / 'cpu.yaml'}", *SMALL, *data, "--runs", str(command.runs)]

    listed = command.run(*arguments, "--dry-run", folder=here)
    assert listed.splitlines() == [f"{row}_s1: to do" for row in found]
    # Up to twelve runs of some 7 s of CPU.
    command.run(*arguments, "--at-once", "2", folder=here, timeout_s=3 * HANG_S)
    for row in found:
        steps = command.rows(f"{name}/{row}_s1")
        assert len(steps) == 2
        assert all(math.isfinite(step["policy/loss"]) for step in steps), row
        assert any(step["policy/grad_norm"] > 0.0 for step in steps), row
    text = command.run(*arguments, "--results", folder=here)
    assert "Partial" not in text
    table, _, others = text.partition("Minus `grpo`")
    assert re.findall(r"^\| `(\w+)` \| 1 \|", table, re.MULTILINE) == ["base", *found]
    assert "At equal pass@1: above the line of `base`, `grpo`, `grpo_half_lr`, `grpo_double_lr`." in others
