"""A run that trains adapters: resumed under another layout, its reference reset, other adapters refused."""

from __future__ import annotations

import shutil

import pytest
from quickstart import Command

ADAPTERS = (
    "policy.lora.rank=8",
    "policy.optimizer={lr: 3.0e-3, warmup_steps: 0, decay: constant}",
    "recipe.methods=[grpo,kl]",
    "recipe.reset.every=2",
    "checkpoint.every=3",
)


@pytest.mark.long("runs")
def test_adapters_train_alike_through_a_resume_on_other_ranks(command: Command) -> None:
    """Step 3 begins at the reference; in step 4 the resumed run has it from its checkpoint alone."""
    out = command.run(*command.train(*ADAPTERS, "steps=4", "name=whole"))
    assert "lora       rank 8, alpha 16 on qkv, proj, fc1, fc2: 65,536 parameters are trained" in out
    shutil.copytree(command.runs / "whole", command.runs / "halves")
    shutil.rmtree(command.runs / "halves" / "checkpoints" / "step_000004")
    refused = command.run(*command.train(*ADAPTERS, "steps=4", "name=halves", "--resume", "policy.lora.rank=4"), code=2)
    assert "policy.lora.rank was 8 and is now 4, which is another run" in refused.splitlines()[-1]
    command.run(*command.train(*ADAPTERS, "steps=4", "name=halves", "--resume", "policy.tp=2"))
    whole, halves = command.rows("whole"), command.rows("halves")
    for one, two in zip(whole, halves, strict=True):
        for key in ("policy/loss", "policy/grad_norm", "entropy/policy", "reward/mean", "policy/kl_ref"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    for rows in (whole, halves):
        # Merged weights sample as adapters beside frozen ones score.
        assert max(row["policy/engine_gap"] for row in rows) < 1e-5
        assert rows[1]["policy/kl_ref"] > 1e-3 > 1e-6 > abs(rows[2]["policy/kl_ref"])
