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
from megasharp.trainer.resolve.recipes import build_recipes, correction_notes, resolved_config


def config(tmp_path: Path, *overrides: str, **recipe: object) -> RunConfig:
    file = tmp_path / "run.yaml"
    tree = {"name": "r", "steps": 9, "model": {"path": "m"}, "data": {"task": "countdown"}, "recipe": recipe}
    file.write_text(yaml.safe_dump(tree))
    return load_run(file, overrides)


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


STALE = ("rollout.engine=sglang", "rollout.max_staleness=2")


def test_stale_dlc_gets_a_correction_that_leaves_its_shift(tmp_path: Path) -> None:
    schedule = [{"until": 2, "methods": ["grpo"]}, {"until": 4, "methods": ["grpo", "bypass", "dlc"]}]
    written = config(tmp_path, *STALE, methods=["grpo", "dlc"], schedule=schedule)
    recipes = build_recipes(written, "run.yaml")
    assert [[n for n, m in recipes.at(s).methods.items() if m.corrects] for s in (1, 3, 5)] == [
        *([], ["bypass"], ["truncated_is"])
    ]
    assert recipes.at(5).methods["truncated_is"].params.against == "policy"
    assert recipes.at(3).methods["bypass"].params.against == "policy"
    notes = correction_notes(written, recipes)
    assert any(note.startswith("truncated_is by token is added") and "recipe.correction=none" in note for note in notes)
    assert any(note.startswith("bypass against policy") and "leaves the shift of dlc" in note for note in notes)
    (tmp_path / "stored.yaml").write_text(dump_yaml(resolved_config(written, recipes)))
    again = build_recipes(load_run(tmp_path / "stored.yaml"), "stored.yaml")
    for before, after in zip(recipes.all, again.all, strict=True):
        assert {n: m.params for n, m in after.methods.items()} == {n: m.params for n, m in before.methods.items()}


@pytest.mark.parametrize(
    ("overrides", "methods"),
    [
        ((), ["grpo", "dlc"]),
        (STALE, ["grpo"]),
        ((*STALE, "recipe.correction=none"), ["grpo", "dlc"]),
    ],
)
def test_nothing_is_added_on_policy_without_dlc_or_where_it_is_turned_off(tmp_path: Path, overrides, methods) -> None:
    written = config(tmp_path, *overrides, methods=methods)
    recipes = build_recipes(written, "run.yaml")
    assert not any(method.corrects for method in recipes.final.methods.values())
    advice = [note for note in correction_notes(written, recipes) if "truncated_is or bypass" in note]
    assert len(advice) == bool(overrides)


def test_gspo_gets_the_correction_by_response(tmp_path: Path) -> None:
    params = build_recipes(config(tmp_path, *STALE, methods=["grpo", "gspo", "dlc"]), "run.yaml").final.methods
    assert params["truncated_is"].params.level == "geometric"


@pytest.mark.parametrize("against", ["policy", "sampler"])
def test_notes_say_what_each_correction_does_to_top_p(tmp_path: Path, against: str) -> None:
    shifted = (*STALE, "rollout.top_p=0.9")
    named = config(tmp_path, *shifted, f"recipe.truncated_is.against={against}", methods=["grpo", "truncated_is"])
    (note,) = correction_notes(named, build_recipes(named, "run.yaml"))
    assert ("undoes the shift of top_p" in note) == (against == "sampler")
    plain = config(tmp_path, *shifted, methods=["grpo"])
    (note,) = correction_notes(plain, build_recipes(plain, "run.yaml"))
    assert "against=policy leaving the shift of top_p, against=sampler undoing it" in note


def test_the_sampler_stays_the_default_without_dlc(tmp_path: Path) -> None:
    methods = build_recipes(config(tmp_path, methods=["grpo", "truncated_is"]), "run.yaml").final.methods
    assert methods["truncated_is"].params.against == "sampler"
