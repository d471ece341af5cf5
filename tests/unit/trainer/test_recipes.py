"""A run's recipes: the schedule of stages, and the configuration as it takes effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megasharp.algos.base import Ramp
from megasharp.algos.clip import ClipParams
from megasharp.algos.kl import KLParams
from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml
from megasharp.config.run_config import RunConfig, load_run
from megasharp.trainer.resolve.recipes import build_recipes, resolved_config


def config(tmp_path: Path, **recipe: object) -> RunConfig:
    file = tmp_path / "run.yaml"
    tree = {"name": "r", "steps": 9, "model": {"path": "m"}, "data": {"task": "countdown"}, "recipe": recipe}
    file.write_text(yaml.safe_dump(tree))
    return load_run(file)


def test_stages_follow_each_other(tmp_path: Path) -> None:
    schedule = [{"until": 2, "methods": ["grpo"]}, {"until": 4, "methods": ["grpo", "kl"]}]
    recipes = build_recipes(config(tmp_path, methods=["grpo", "dlc"], schedule=schedule), "run.yaml")
    names = [list(recipes.at(step).methods) for step in (1, 2, 3, 4, 5, 99)]
    assert names == [["grpo", "clip"]] * 2 + [["grpo", "kl", "clip"]] * 2 + [["grpo", "dlc", "clip"]] * 2
    assert recipes.needs.ref_logp and recipes.needs.memory is not None
    assert recipes.at(1).needs.memory is None


def test_stages_must_come_in_order(tmp_path: Path) -> None:
    schedule = [{"until": 4, "methods": ["grpo"]}, {"until": 4, "methods": ["grpo"]}]
    with pytest.raises(UserError, match=r"run.yaml: recipe.schedule: .* found \[4, 4\]"):
        build_recipes(config(tmp_path, schedule=schedule), "run.yaml")


def test_a_mistake_in_a_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^run.yaml: recipe.schedule\[0\].methods: unknown method 'nope'"):
        build_recipes(config(tmp_path, schedule=[{"until": 4, "methods": ["nope"]}]), "run.yaml")


def test_coefficients_ramp_with_the_step(tmp_path: Path) -> None:
    ramp = {"start": 0.1, "end": 0.3, "steps": 4}
    recipes = build_recipes(config(tmp_path, methods=["grpo", "kl"], kl={"coefficient": ramp}), "run.yaml")
    values = [recipes.at(step).methods["kl"].params.coefficient for step in (1, 2, 3, 4, 5, 6)]
    assert values == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3])
    cosine = Ramp(start=1.0, end=0.0, steps=2, shape="cosine")
    assert [cosine.at(step) for step in (1, 2, 3, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_resolved_shows_what_takes_effect_and_reads_back_the_same(tmp_path: Path) -> None:
    """The bundle's bounds stand in the stored file; reading it again gives the same recipe."""
    written = config(tmp_path, methods=["dapo"], clip={"low": 0.1})
    recipes = build_recipes(written, "run.yaml")
    stored = resolved_config(written, recipes)
    assert stored.recipe.params()["clip"] == recipes.final.methods["clip"].params
    assert stored.recipe.params()["clip"] == ClipParams(low=0.1, high=0.28, dual=stored.recipe.params()["clip"].dual)
    (tmp_path / "stored.yaml").write_text(dump_yaml(stored))
    again = load_run(tmp_path / "stored.yaml")
    assert again == stored
    reread = build_recipes(again, "stored.yaml").final
    assert {n: m.params for n, m in reread.methods.items()} == {n: m.params for n, m in recipes.final.methods.items()}


def test_a_table_that_differs_between_stages_stays_as_written(tmp_path: Path) -> None:
    written = config(tmp_path, methods=["dapo"], schedule=[{"until": 3, "methods": ["grpo"]}], kl={"coefficient": 0.5})
    recipes = build_recipes(written, "run.yaml")
    stored = resolved_config(written, recipes)
    assert stored.recipe.params()["clip"].model_fields_set == set()
    assert stored.recipe.params()["kl"] == KLParams(coefficient=0.5)
    (tmp_path / "stored.yaml").write_text(dump_yaml(stored))
    reread = build_recipes(load_run(tmp_path / "stored.yaml"), "stored.yaml")
    for before, after in zip(recipes.all, reread.all, strict=True):
        assert {n: m.params for n, m in after.methods.items()} == {n: m.params for n, m in before.methods.items()}


def test_a_step_of_the_memory_network_needs_a_group(tmp_path: Path) -> None:
    many = config(tmp_path, methods=["grpo", "dlc"], dlc={"memory": {"steps": 1000}})
    with pytest.raises(UserError, match=r"recipe\.dlc\.memory\.steps=1000 is more than data\.prompts_per_step="):
        build_recipes(many, "run.yaml")
