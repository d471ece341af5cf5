"""The lines that say what a run will occupy."""

from __future__ import annotations

from pathlib import Path

from cases import each_case

from megasharp.config.run_config import load_run
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.resolve.summary import describe

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml"
UNREAD = "note       recipe.dlc is set, but no method of the recipe reads it"
BEYOND = "note       recipe.schedule: the run ends before what follows step 200"


def test_adapters_are_told_with_how_much_is_trained() -> None:
    """4 layers; an A of 8 x 128 for each of query, key and value, and a B with their 256 rows."""
    lines = describe(check(load_run(QUICKSTART, ["policy.lora={rank: 8, targets: [qkv]}"]), "run.yaml")).splitlines()
    (line,) = [line for line in lines if line.startswith("lora")]
    assert line == "lora       rank 8, alpha 16 on qkv: 20,480 parameters are trained, the others stay"
    assert not any(line.startswith("lora") for line in describe(check(load_run(QUICKSTART), "run.yaml")).splitlines())


@each_case(
    ("overrides", "notes"),
    [
        ([], []),
        (["recipe.dlc={mu: 0.1}"], [UNREAD]),
        # The table of a method that a bundle or the default brings is read.
        (["recipe.clip={low: 0.1}"], []),
        # In play for some of the steps only.
        (["recipe.iac={}", "recipe.schedule=[{until: 199, methods: [grpo, iac]}]"], []),
        (["recipe.schedule=[{until: 200, methods: [grpo, iac]}]"], [BEYOND]),
        (["recipe.dlc={mu: 0.1}", "recipe.schedule=[{until: 200, methods: [grpo, iac]}]"], [UNREAD, BEYOND]),
    ],
)
def test_what_has_no_effect_is_said(overrides: list[str], notes: list[str]) -> None:
    lines = describe(check(load_run(QUICKSTART, overrides), "run.yaml")).splitlines()
    assert [line for line in lines if line.startswith("note")] == notes
