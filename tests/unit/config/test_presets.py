"""What ships as YAML: everything parses, every method has a preset, and the papers' rows are whole, listed runs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from cases import each_case

from megasharp.algos import METHODS
from megasharp.algos.recipe import RecipeSchedule
from megasharp.common.section import Section
from megasharp.config.core import Tree, dump_tree, merge, parse_yaml, read_tree, validate
from megasharp.config.run_config import RunConfig, load_run
from megasharp.evals.groups import load_group
from megasharp.evals.suites import SuiteFile
from megasharp.reporting.sweeps.grid import cells, load_sweep
from megasharp.tasks.environments.problem_file import EnvironmentFile
from megasharp.tasks.reasoning_gym import read_datasets
from megasharp.tasks.sets import SETS
from megasharp.tasks.table import TASKS
from megasharp.tasks.tools.tool_file import ToolFile
from megasharp.trainer.resolve.recipes import build_recipes

REPOSITORY = Path(__file__).parents[3]
PAPER = REPOSITORY / "configs" / "algo" / "paper"
README = PAPER / "README.md"
MINIMAL = """
name: tiny
steps: 3
model: {path: some/folder}
data: {task: countdown, path: train.jsonl}
"""


# Every file is read once, and by a test: collecting reads none.
tree_of = cache(read_tree)


# Manifests of other launchers, which tests/unit/cluster/test_launchers.py reads.
MANIFESTS = {REPOSITORY / "examples" / "kuberay", REPOSITORY / "examples" / "skypilot"}


@cache
def shipped() -> tuple[Path, ...]:
    files = (path for folder in ("configs", "examples") for path in (REPOSITORY / folder).rglob("*.yaml"))
    return tuple(sorted(path for path in files if path.parent not in MANIFESTS))


def is_suite(file: Path) -> bool:
    of_example = file.parent.name == "suites" and file.is_relative_to(REPOSITORY / "examples")
    return of_example or file.parent == REPOSITORY / "configs" / "task"


def is_group(file: Path) -> bool:
    return file.parent == REPOSITORY / "configs" / "suites"


def is_data(file: Path) -> bool:
    """Data sets for reasoning-gym to generate."""
    return file.parent == REPOSITORY / "configs" / "gym"


def problem_schema(file: Path) -> type[Section] | None:
    """The schema of a file of an environment's problems, or of problems with tools; None for any other file."""
    keys = tree_of(file).keys()
    return EnvironmentFile if "use" in keys else ToolFile if "tools" in keys else None


def label(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def on_minimal(tree: Tree, file: Path) -> RunConfig:
    minimal: Tree = parse_yaml(MINIMAL, "minimal")
    if {"set", "mix"} & tree.get("data", {}).keys():
        del minimal["data"]
    return validate(RunConfig, merge(minimal, tree), str(file))


def says(file: Path) -> set[str]:
    """Whether it names itself, as whole runs do, and a run, as what sweeps share does; a sweep says both."""
    return {"name", "run"} & tree_of(file).keys()


def whole_runs() -> list[Path]:
    return [file for file in shipped() if says(file) == {"name"}]


def sweeps() -> list[Path]:
    return [file for file in shipped() if says(file) == {"name", "run"}]


def pieces() -> list[Path]:
    """What is neither of both, nor shared by sweeps, which are checked whole."""
    others = (says, is_suite, is_group, is_data, problem_schema)
    return [file for file in shipped() if not any(is_other(file) for is_other in others)]


def suites() -> list[Path]:
    return [file for file in shipped() if is_suite(file)]


def groups() -> list[Path]:
    return [file for file in shipped() if is_group(file)]


def rows() -> list[Path]:
    return [file for file in sorted(PAPER.glob("*.yaml")) if not file.name.startswith("_")]


@cache
def run_of(file: Path, *overrides: str) -> RunConfig:
    return load_run(file, overrides)


@cache
def recipes_of(file: Path, *overrides: str) -> RecipeSchedule:
    return build_recipes(run_of(file, *overrides), str(file))


@each_case("file", whole_runs, ids=label)
def test_whole_runs_parse_and_their_recipes_are_built(file: Path) -> None:
    assert recipes_of(file).final.methods


@each_case("file", sweeps, ids=label)
def test_sweeps_stand_for_runs_whose_recipes_are_built(file: Path, tmp_path: Path) -> None:
    for cell in {cell.row: cell for cell in cells(load_sweep(file), file)}.values():
        path = tmp_path / f"{cell.name}.yaml"
        path.write_text(dump_tree(cell.tree))
        assert recipes_of(path).final.methods


@each_case("file", pieces, ids=label)
def test_pieces_fit_a_run(file: Path) -> None:
    build_recipes(on_minimal(tree_of(file), file), str(file))


@each_case("file", suites, ids=label)
def test_suites_fit_their_schema(file: Path) -> None:
    suite = validate(SuiteFile, tree_of(file), str(file))
    assert suite.set in SETS or (suite.task in TASKS and suite.path)


def test_generated_data_fits_its_schema() -> None:
    files = [file for file in shipped() if is_data(file)]
    assert files and all(read_datasets(file) for file in files)


def test_problem_files_fit_their_schema() -> None:
    found = [(file, schema) for file in shipped() if (schema := problem_schema(file))]
    assert {schema for _, schema in found} == {EnvironmentFile, ToolFile}
    for file, schema in found:
        validate(schema, tree_of(file), str(file))


@each_case("file", groups, ids=label)
def test_groups_are_of_suites_that_ship(file: Path) -> None:
    group = load_group(str(file))
    assert group is not None
    assert {member.suite for member in group.members} <= {suite.stem for suite in suites()}


@each_case("name", METHODS)
def test_every_method_has_a_preset_that_uses_it(name: str) -> None:
    file = REPOSITORY / "configs" / "algo" / f"{name}.yaml"
    assert file.is_file(), f"method {name!r} has no preset {label(file)}"
    assert name in build_recipes(on_minimal(tree_of(file), file), str(file)).final.methods


@each_case("file", rows, ids=lambda file: file.stem)
def test_a_row_is_a_whole_run_of_its_own_name_with_a_stated_reduction(file: Path) -> None:
    tree = tree_of(file)
    assert tree["name"] == file.stem
    reductions = {recipe.reduction.value for recipe in recipes_of(file).all}
    assert reductions == {tree["recipe"]["reduction"]}
    assert tree["data"]["prompts_per_step"] % tree["recipe"]["mini_batches"] == 0


@each_case("file", rows, ids=lambda file: file.stem)
def test_a_row_opens_with_its_source_and_its_reduction(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    assert re.search(r"\d{4}\.\d{5}", header[0])
    stated = next(line for line in header if line.startswith("# Reduction: "))
    assert stated.removeprefix("# Reduction: ").startswith(tree_of(file)["recipe"]["reduction"])


def test_rows_differ() -> None:
    configs = [run_of(file).model_copy(update={"name": "same"}) for file in rows()]
    names = [file.stem for file in rows()]
    twins = [(names[i], names[j]) for i in range(len(names)) for j in range(i) if configs[i] == configs[j]]
    assert twins == []


def test_the_readme_lists_every_row_once() -> None:
    listed = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\) \|", README.read_text(), re.MULTILINE)
    assert all(target == f"{name}.yaml" for name, target in listed)
    assert sorted(name for name, _ in listed) == sorted(file.stem for file in rows())


def overrides_in_readme() -> list[tuple[str, str]]:
    """A row and the overrides that the README names for it."""
    return re.findall(r"^\| [^|`]+ \| `([^`]+)` \| (`[^|]+`) \|$", README.read_text(), re.MULTILINE)


@each_case(("name", "overrides"), overrides_in_readme, ids=str)
def test_the_readmes_overrides_change_the_row(name: str, overrides: str) -> None:
    file = PAPER / f"{name}.yaml"
    items = re.findall(r"`([^`]+)`", overrides)
    changed = run_of(file, *items)
    assert changed != run_of(file)
    assert recipes_of(file, *items).final.methods


@each_case(("name", "overrides"), overrides_in_readme, ids=str)
def test_ds_in_its_reward_form_meets_no_division_by_the_deviation(name: str, overrides: str) -> None:
    methods = recipes_of(PAPER / f"{name}.yaml", *re.findall(r"`([^`]+)`", overrides)).final.methods
    assert not ("grpo" in methods and "ds" in methods and methods["ds"].params.form == "reward_seq_mean")
