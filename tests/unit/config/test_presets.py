"""What ships as YAML: everything parses, every method has a preset, and the papers' rows are whole, listed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megasharp.algos import METHODS
from megasharp.algos.schedule import RecipeSchedule
from megasharp.build.recipes import build_recipes
from megasharp.config.core import Tree, dump_tree, merge, parse_yaml, read_tree, validate
from megasharp.config.run import RunConfig, load_run
from megasharp.data.sets import SETS
from megasharp.data.tasks import TASKS
from megasharp.evals.groups import load_group
from megasharp.evals.suites import SuiteFile
from megasharp.sweeps.grid import cells, load_sweep

REPOSITORY = Path(__file__).parents[3]
PAPER = REPOSITORY / "configs" / "algo" / "paper"
README = PAPER / "README.md"
MINIMAL = """
name: tiny
steps: 3
model: {path: some/folder}
data: {task: countdown, path: train.jsonl}
"""


def shipped() -> list[Path]:
    return sorted(path for folder in ("configs", "examples") for path in (REPOSITORY / folder).rglob("*.yaml"))


def is_suite(file: Path) -> bool:
    of_example = file.parent.name == "suites" and file.is_relative_to(REPOSITORY / "examples")
    return of_example or file.parent == REPOSITORY / "configs" / "task"


def is_group(file: Path) -> bool:
    return file.parent == REPOSITORY / "configs" / "suites"


def label(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def on_minimal(tree: Tree, file: Path) -> RunConfig:
    minimal: Tree = parse_yaml(MINIMAL, "minimal")
    if "set" in tree.get("data", {}):
        del minimal["data"]
    return validate(RunConfig, merge(minimal, tree), str(file))


WHOLE_RUNS = [file for file in shipped() if {"name", "run"} & read_tree(file).keys() == {"name"}]
SWEEPS = [file for file in shipped() if {"name", "run"} <= read_tree(file).keys()]
SUITES = [file for file in shipped() if is_suite(file)]
# What sweeps share names their run and nothing else of one; the sweeps built on it are checked whole.
SHARED_BY_SWEEPS = [file for file in shipped() if {"name", "run"} & read_tree(file).keys() == {"run"}]
OTHER_KINDS = [*WHOLE_RUNS, *SWEEPS, *SHARED_BY_SWEEPS]
PIECES = [file for file in shipped() if file not in OTHER_KINDS and not (is_suite(file) or is_group(file))]
GROUPS = [file for file in shipped() if is_group(file)]
ROWS = [file for file in sorted(PAPER.glob("*.yaml")) if not file.name.startswith("_")]


def recipes_of(file: Path, *overrides: str) -> RecipeSchedule:
    return build_recipes(load_run(file, overrides), str(file))


@pytest.mark.parametrize("file", WHOLE_RUNS, ids=label)
def test_whole_runs_parse_and_their_recipes_are_built(file: Path) -> None:
    assert recipes_of(file).final.methods


@pytest.mark.parametrize("file", SWEEPS, ids=label)
def test_sweeps_stand_for_runs_whose_recipes_are_built(file: Path, tmp_path: Path) -> None:
    for cell in {cell.row: cell for cell in cells(load_sweep(file), file)}.values():
        path = tmp_path / f"{cell.name}.yaml"
        path.write_text(dump_tree(cell.tree))
        assert recipes_of(path).final.methods


@pytest.mark.parametrize("file", PIECES, ids=label)
def test_pieces_fit_a_run(file: Path) -> None:
    build_recipes(on_minimal(read_tree(file), file), str(file))


@pytest.mark.parametrize("file", SUITES, ids=label)
def test_suites_fit_their_schema(file: Path) -> None:
    suite = validate(SuiteFile, read_tree(file), str(file))
    assert suite.set in SETS or (suite.task in TASKS and suite.path)


@pytest.mark.parametrize("file", GROUPS, ids=label)
def test_groups_are_of_suites_that_ship(file: Path) -> None:
    group = load_group(str(file))
    assert group is not None
    assert {member.suite for member in group.members} <= {suite.stem for suite in SUITES}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_preset_that_uses_it(name: str) -> None:
    file = REPOSITORY / "configs" / "algo" / f"{name}.yaml"
    assert file.is_file(), f"method {name!r} has no preset {label(file)}"
    assert name in build_recipes(on_minimal(read_tree(file), file), str(file)).final.methods


@pytest.mark.parametrize("file", ROWS, ids=lambda file: file.stem)
def test_a_row_is_a_whole_run_of_its_own_name_with_a_stated_reduction(file: Path) -> None:
    tree = read_tree(file)
    assert tree["name"] == file.stem
    reductions = {recipe.reduction.value for recipe in recipes_of(file).all}
    assert reductions == {tree["recipe"]["reduction"]}
    assert tree["data"]["prompts_per_step"] % tree["recipe"]["mini_batches"] == 0


@pytest.mark.parametrize("file", ROWS, ids=lambda file: file.stem)
def test_a_row_opens_with_its_source_and_its_reduction(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    assert re.search(r"\d{4}\.\d{5}", header[0])
    stated = next(line for line in header if line.startswith("# Reduction: "))
    assert stated.removeprefix("# Reduction: ").startswith(read_tree(file)["recipe"]["reduction"])


def test_rows_differ() -> None:
    configs = [load_run(file).model_copy(update={"name": "same"}) for file in ROWS]
    twins = [(a.stem, b.stem) for i, a in enumerate(ROWS) for j, b in enumerate(ROWS[:i]) if configs[i] == configs[j]]
    assert twins == []


def test_the_readme_lists_every_row_once() -> None:
    listed = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\) \|", README.read_text(), re.MULTILINE)
    assert all(target == f"{name}.yaml" for name, target in listed)
    assert sorted(name for name, _ in listed) == sorted(file.stem for file in ROWS)


OVERRIDES = re.findall(r"^\| [^|`]+ \| `([^`]+)` \| (`[^|]+`) \|$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "overrides"), OVERRIDES, ids=[f"{name}-{text}" for name, text in OVERRIDES])
def test_the_readmes_overrides_change_the_row(name: str, overrides: str) -> None:
    file = PAPER / f"{name}.yaml"
    items = re.findall(r"`([^`]+)`", overrides)
    changed = load_run(file, items)
    assert changed != load_run(file)
    assert recipes_of(file, *items).final.methods


@pytest.mark.parametrize(("name", "overrides"), OVERRIDES, ids=[f"{name}-{text}" for name, text in OVERRIDES])
def test_ds_in_its_reward_form_meets_no_division_by_the_deviation(name: str, overrides: str) -> None:
    methods = recipes_of(PAPER / f"{name}.yaml", *re.findall(r"`([^`]+)`", overrides)).final.methods
    assert not ("grpo" in methods and "ds" in methods and methods["ds"].params.form == "reward_seq_mean")
