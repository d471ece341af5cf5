"""Stages and resets that cannot come true are refused in one line; those that can become rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml
from megasharp.config.run_config import RunConfig, load_run
from megasharp.trainer.resolve.recipes import build_recipes, check_prolonged, resolved_config, what_is_reset

REPOSITORY = Path(__file__).parents[3]
RUN = """
name: long
steps: 90
model: {path: m}
data: {task: countdown, max_response_tokens: 64}
eval: {every: 5, suites: [countdown_dev], n: 4, k: [1, 4]}
"""
STAGES = "data.stages=[{until: 10, max_response_tokens: 16}, {until: 20, max_response_tokens: 128}]"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def checked(file: Path, *overrides: str) -> RunConfig:
    config = load_run(file, overrides)
    check_prolonged(config, build_recipes(config, "run.yaml").needs, "run.yaml")
    return config


@each_case(
    ("overrides", "message"),
    [
        (
            ["recipe.reset.stagnation.metric=eval/countdown_dev/pass@3"],
            r"recipe.reset.stagnation.metric: no evaluation gives 'eval/countdown_dev/pass@3'; eval gives: "
            r"eval/countdown_dev/pass@1, eval/countdown_dev/pass@4, eval/countdown_dev/avg@n",
        ),
        (["recipe.reset.stagnation.metric=eval/other/pass@1"], "no evaluation gives 'eval/other/pass@1'"),
        (["recipe.reset.stagnation.metric=eval/countdown_dev/length_mean"], "no evaluation gives"),
        (["checkpoint.keep_best=eval/countdown_dev+memory/pass@1"], r"checkpoint.keep_best: no evaluation gives"),
        (["checkpoint.keep_best=eval/countdown_dev/pass@1", "eval.every=0"], "keep_best: .*set eval.every"),
        (
            ["data.stages=[{max_response_tokens: 9, stagnation: {metric: reward/mean}}]"],
            r"data.stages\[0\].stagnation.metric: no evaluation gives 'reward/mean'",
        ),
        (
            ["data.stages=[{until: 5, max_response_tokens: 9}, {until: 5, max_response_tokens: 8}]"],
            r"data.stages: each `until` must be above the one before it, found \[5, 5\]",
        ),
        (["recipe.reset={every: 3, optimizer: keep}"], "recipe.reset has nothing to reset"),
    ],
)
def test_what_cannot_come_true_is_refused(run_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"^run.yaml: .*{message}") as refused:
        checked(run_file, *overrides)
    assert "\n" not in str(refused.value)


@each_case(
    ("file", "data", "responses"),
    [
        ("prolonged.yaml", "{}", [16, 32]),
        ("prolonged_schedule.yaml", "{task: t}", [16, 32]),
        ("algo/paper/prorl_mixed_r1-distill-qwen-1.5b.yaml", "{task: t}", [None]),
    ],
)
def test_what_ships_for_long_runs_can_come_true(
    run_file: Path, file: str, data: str, responses: list[int | None]
) -> None:
    run_file.write_text(f"{RUN.partition('data:')[0]}data: {data}\ninclude: [{REPOSITORY / 'configs' / file}]\n")
    config = checked(run_file)
    assert [stage.responses_per_prompt for stage in config.data.stages] == responses
    assert config.recipe.reset.stagnation is not None


@each_case(
    ("override", "message"),
    [
        ("data.stages=[{max_response_tokens: 9}]", "say when this stage ends: until, above or stagnation"),
        ("data.stages=[{above: {metric: rollout/nope, value: 1.0}, max_response_tokens: 9}]", "rollout/truncated"),
        ("recipe.reset.stagnation=5", "recipe.reset.stagnation: "),
    ],
)
def test_what_the_schema_refuses(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_run(run_file, [override])


def test_what_can_is_let_through(run_file: Path) -> None:
    checked(
        run_file,
        STAGES,
        "recipe.reset.stagnation={metric: eval/countdown_dev+memory/pass@4, patience: 2}",
        "checkpoint.keep_best=eval/countdown_dev/greedy",
        "eval.with_memory=true",
    )


def test_a_reference_is_reset_where_a_method_reads_one(run_file: Path) -> None:
    for methods, optimizer, what in (
        ("grpo", "reinit", ("optimizer",)),
        ("grpo,kl", "reinit", ("reference", "optimizer")),
        ("grpo,kl", "keep", ("reference",)),
    ):
        reset = f"recipe.reset={{every: 5, optimizer: {optimizer}}}"
        config = load_run(run_file, [f"recipe.methods=[{methods}]", reset])
        assert what_is_reset(config, build_recipes(config, "run.yaml").needs) == what


def test_stages_of_length_compose_with_the_schedule_of_recipes(run_file: Path) -> None:
    """Each by itself: the recipe follows the step, what methods know of the limit follows the stage of length."""
    schedule = "recipe.schedule=[{until: 15, methods: [grpo, soft_overlong]}]"
    config = checked(run_file, STAGES, schedule, "recipe.methods=[rloo, soft_overlong]")
    recipes = build_recipes(config, "run.yaml")
    found = [
        (next(iter(r.methods)), r.methods["soft_overlong"].params.max_tokens)
        for r in (recipes.at(5, 16), recipes.at(12, 128), recipes.at(17, 128), recipes.at(30, 64), recipes.at(30))
    ]
    assert found == [("grpo", 16), ("grpo", 128), ("rloo", 128), ("rloo", 64), ("rloo", 128)]


def test_the_constant_of_the_loss_is_one_for_the_whole_run(run_file: Path) -> None:
    recipes = build_recipes(checked(run_file, STAGES, "recipe.methods=[dr_grpo]"), "run.yaml")
    assert {recipe.constant for recipe in recipes.all} == {128.0}
    assert len(recipes.all) == 3


def test_a_limit_that_a_method_takes_from_its_stage_is_not_stored(run_file: Path) -> None:
    """Stored and read again, a limit of one stage would be that of all."""
    config = checked(run_file, STAGES, "recipe.methods=[grpo, soft_overlong]")
    stored = resolved_config(config, build_recipes(config, "run.yaml"))
    assert stored.recipe.params()["soft_overlong"].model_fields_set == set()
    run_file.write_text(dump_yaml(stored))
    again = build_recipes(load_run(run_file), "stored.yaml")
    assert again.at(1, 16).methods["soft_overlong"].params.max_tokens == 16
