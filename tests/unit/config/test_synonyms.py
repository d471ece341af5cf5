"""Names of other trainers lead to keys that exist, and an unknown key's line names ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import apply_overrides, validate
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys
from megasharp.config.synonyms import NAMES, rows

KEYS = {key for key, _ in described_keys(RunConfig)}
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "come-from-another-trainer.md"
RUN = {"name": "r", "steps": 1, "model": {"path": "m"}, "data": {"task": "countdown", "path": "p"}}


@each_case("name", NAMES)
def test_every_counterpart_is_a_key(name: str) -> None:
    assert [(row.theirs, ours) for row in rows(name) for ours in row.ours if ours not in KEYS] == []


@each_case("name", NAMES)
def test_a_key_without_a_counterpart_has_a_reason(name: str) -> None:
    assert [row.theirs for row in rows(name) if not row.ours and not row.text] == []


@each_case(
    ("key", "hint"),
    [
        ("learning_rate", "; learning_rate is called policy.optimizer.lr here (TRL: learning_rate)"),
        ("lr", "; its full name is policy.optimizer.lr"),
        ("policy.lr", "; its full name is policy.optimizer.lr"),
        ("batch_size", "; batch_size is called data.prompts_per_step here: prompts"),
        ("num_generations", "; num_generations is called data.responses_per_prompt here (TRL: num_generations)"),
        ("rollout_n", "; rollout_n is called data.responses_per_prompt here (verl: actor_rollout_ref.actor.rollout_n)"),
        ("kl_coef", "; kl_coef is called recipe.kl.coefficient here (slime: kl_coef): a term of the loss"),
        (
            "tensor_parallel_size",
            "; tensor_parallel_size is called policy.tp and rollout.tp here: of the policy, of an",
        ),
        (
            "actor_rollout_ref.rollout.n",
            "; n is called data.responses_per_prompt here (verl: actor_rollout_ref.rollout.n)",
        ),
        ("rollout-batch-size", "; rollout_batch_size is called data.prompts_per_step here (slime: rollout_batch_size)"),
        ("grpo.num_prompts_per_step", "; num_prompts_per_step is called data.prompts_per_step here (NeMo-RL: grpo.num"),
        ("recipe.beta", "; beta is called recipe.kl.coefficient here (TRL: beta): with kl in recipe.methods"),
        ("critic.optim.lr", ", without a counterpart here (verl: critic.*): advantages come from groups"),
        ("num_iterations", ", without a counterpart here (TRL: num_iterations): each sample is used once"),
        ("responses_per_prompt", "; its full name is data.responses_per_prompt"),
        ("policy.tpp", ", nearest is tp; known keys here: "),
    ],
)
def test_an_unknown_key_is_told_by_our_name(key: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(RunConfig, apply_overrides(RUN, [f"{key}=1"]), "run.yaml")
    assert f": unknown key{hint}" in str(refused.value) and "\n" not in str(refused.value)


def table(name: str) -> str:
    """The rows of a trainer's table with a counterpart, as the manual shows them."""
    lines = (
        f"| `{row.theirs}` | {', '.join(f'`{key}`' for key in row.ours)} | {row.text} |"
        for row in rows(name)
        if row.ours
    )
    return "\n".join(("| theirs | here | |", "|---|---|---|", *lines, ""))


@each_case("name", [name for name in NAMES if name != "general"])
def test_the_manual_shows_each_table(name: str) -> None:
    assert table(name) in PAGE.read_text(encoding="utf-8"), f"{PAGE}: put in\n{table(name)}"
