"""What ships as YAML: everything parses, every method has a preset, and the papers' rows say what the papers say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megasharp.algos import METHODS
from megasharp.algos.schedule import RecipeSchedule
from megasharp.build.recipes import build_recipes
from megasharp.config.core import Tree, merge, parse_yaml, read_tree, validate
from megasharp.config.run import RunConfig, load_run
from megasharp.evals.suites import SuiteFile

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
    return file.parent == REPOSITORY / "configs" / "task"


def label(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def on_minimal(tree: Tree, file: Path) -> RunConfig:
    minimal: Tree = parse_yaml(MINIMAL, "minimal")
    return validate(RunConfig, merge(minimal, tree), str(file))


WHOLE_RUNS = [file for file in shipped() if "name" in read_tree(file)]
SUITES = [file for file in shipped() if is_suite(file)]
PIECES = [file for file in shipped() if file not in WHOLE_RUNS and not is_suite(file)]
ROWS = [file for file in sorted(PAPER.glob("*.yaml")) if not file.name.startswith("_")]


def recipes_of(file: Path, *overrides: str) -> RecipeSchedule:
    return build_recipes(load_run(file, overrides), str(file))


@pytest.mark.parametrize("file", WHOLE_RUNS, ids=label)
def test_whole_runs_parse_and_their_recipes_are_built(file: Path) -> None:
    assert recipes_of(file).final.methods


@pytest.mark.parametrize("file", PIECES, ids=label)
def test_pieces_fit_a_run(file: Path) -> None:
    build_recipes(on_minimal(read_tree(file), file), str(file))


@pytest.mark.parametrize("file", SUITES, ids=label)
def test_suites_fit_their_schema(file: Path) -> None:
    assert validate(SuiteFile, read_tree(file), str(file)).task


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


class Printed(NamedTuple):
    """A row's numbers as the paper, or the script where there is no table, has them."""

    prompts: int
    responses: int
    mini_batch_prompts: int
    prompt_tokens: int
    response_tokens: int
    clip: tuple[float, float]
    temperature: float
    lr: float


PRINTED = {
    "casp_math_qwen2.5-math-7b": Printed(1024, 8, 256, 1024, 3072, (0.2, 0.2), 1.0, 1e-6),
    "casp_math_llama3.2-3b-instruct": Printed(1024, 8, 256, 1024, 3072, (0.2, 0.2), 1.0, 1e-6),
    "casp_math_qwen2.5-32b_alpha0.05": Printed(1024, 8, 256, 1024, 8192, (0.2, 0.2), 1.0, 1e-6),
    "casp_logic_qwen2.5-7b": Printed(128, 16, 32, 2048, 8192, (0.2, 0.28), 1.0, 1e-6),
    "casp_code_r1-distill-qwen-7b": Printed(128, 8, 32, 2048, 8192, (0.2, 0.2), 0.6, 1e-6),
    "ds_countdown_qwen2.5-3b-instruct": Printed(128, 5, 64, 2048, 8192, (0.2, 0.2), 1.0, 1e-6),
    "ds_math_qwen3-1.7b": Printed(32, 8, 16, 1024, 4096, (0.2, 0.25), 0.7, 5e-7),
    "ds_math_qwen2.5-math-1.5b": Printed(32, 8, 32, 1024, 2048, (0.2, 0.25), 0.7, 1e-6),
    "ds_math_qwen2.5-math-7b": Printed(32, 8, 32, 1024, 2048, (0.2, 0.25), 0.7, 1e-6),
    "ds_math_ministral-8b": Printed(32, 8, 16, 1024, 2048, (0.2, 0.22), 0.7, 3e-7),
    "two_stage_math_qwen2.5-math-7b_gspo_n": Printed(1024, 8, 256, 1024, 3072, (0.2, 0.2), 1.0, 1e-6),
    "dapo_math_qwen2.5-32b": Printed(512, 16, 32, 2048, 20480, (0.2, 0.28), 1.0, 1e-6),
    "clip_cov_math_qwen2.5-7b": Printed(256, 8, 32, 2048, 8192, (1.0, 1.0), 1.0, 5e-7),
    "gspo_gsm8k_qwen2.5-3b-instruct": Printed(512, 16, 128, 2048, 8192, (3e-4, 4e-4), 1.0, 1e-6),
}


@pytest.mark.parametrize("name", PRINTED)
def test_numbers_are_the_papers(name: str) -> None:
    config = load_run(PAPER / f"{name}.yaml")
    clip = recipes_of(PAPER / f"{name}.yaml").final.methods["clip"].params
    data = config.data
    assert PRINTED[name] == Printed(
        data.prompts_per_step,
        data.responses_per_prompt,
        data.prompts_per_step // config.recipe.mini_batches,
        data.max_prompt_tokens,
        data.max_response_tokens,
        (clip.low, clip.high),
        config.rollout.temperature,
        config.policy.optimizer.lr,
    )


@pytest.mark.parametrize(
    ("name", "method", "values"),
    [
        ("casp_math_qwen2.5-32b_alpha0.01", "casp", {"alpha": 0.01, "topn": 3, "quantile": 0.8, "lambda_top1": 1.1}),
        ("casp_math_qwen2.5-32b_alpha0.05", "casp", {"alpha": 0.05, "lambda_top1": 1.1}),
        ("casp_logic_qwen2.5-7b", "casp", {"alpha": 0.005, "topn": 3, "lambda_top1": 1.05}),
        ("casp_code_r1-distill-qwen-7b", "casp", {"alpha": 0.05, "topn": 3, "lambda_top1": 1.1}),
        ("casp_math_qwen2.5-32b_entropy_bonus", "entropy_bonus", {"coefficient": 0.01}),
        ("iac_deepscaler_qwen3-8b_filtering", "difficulty_filter", {"drop_easiest": 0.25}),
        ("ds_countdown_qwen2.5-3b-instruct", "ds", {"gamma_p": 0.03, "gamma_n": 0.01}),
        ("ds_countdown_qwen2.5-3b-instruct", "entropy_bonus", {"coefficient": 0.001}),
        ("ds_math_qwen3-1.7b", "ds", {"gamma_p": 0.02, "gamma_n": 0.002}),
        ("ds_math_qwen2.5-math-7b", "ds", {"gamma_p": 0.01, "gamma_n": 0.01}),
        ("ds_math_ministral-8b", "ds", {"gamma_p": 0.02, "gamma_n": 0.002}),
        ("ds_math_ministral-8b", "kl", {"coefficient": 0.001}),
        ("two_stage_math_llama3.2-3b-instruct_grpo_n", "kl", {"coefficient": 1e-3}),
        ("two_stage_math_llama3.2-3b-instruct_grpo_n", "entropy_bonus", {"coefficient": 1e-4}),
        ("kl_cov_math_qwen2.5-7b", "kl_cov", {"share": 0.2 / 100, "coefficient": 1.0}),
        ("kl_cov_math_qwen2.5-32b", "kl_cov", {"share": 0.02 / 100, "coefficient": 1.0}),
        ("dapo_math_qwen2.5-32b", "soft_overlong", {"max_tokens": 20480, "cache_tokens": 4096}),
    ],
)
def test_method_values_are_the_papers(name: str, method: str, values: dict[str, float]) -> None:
    params = dict(recipes_of(PAPER / f"{name}.yaml").final.methods[method].params)
    assert {key: params[key] for key in values} == pytest.approx(values)


def test_logic_runs_warm_up_with_grpo() -> None:
    recipes = recipes_of(PAPER / "casp_logic_qwen2.5-7b.yaml")
    assert ["casp" in recipes.at(step).methods for step in (1, 50, 51, 300)] == [False, False, True, True]


def lines_of(file: Path) -> list[str]:
    """The lines of a row and of what it includes."""
    text = file.read_text()
    included = parse_yaml(text, str(file)).get("include", [])
    return [*text.splitlines(), *(line for name in included for line in lines_of(file.parent / name))]


def marked(file: Path, mark: str) -> set[str]:
    """The keys whose line carries `# unknown:` or `# derived:`."""
    found = (re.match(rf"\s*(\w+): .*# {mark}: \S", line) for line in lines_of(file))
    return {match[1] for match in found if match}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("casp_math_qwen2.5-math-7b_passk_training", {"k", "every", "betas"}),
        ("casp_logic_qwen2.5-7b", {"steps", "max_rounds"}),
        ("iac_deepscaler_qwen3-4b", {"form", "max_response_tokens", "temperature", "low", "high", "coefficient"}),
        ("iac_deepscaler_qwen3-8b_dapo_iac_dlc", {"mu", "form", "mini_batches", "path"}),
        ("ds_countdown_qwen2.5-3b-instruct", {"lr", "coefficient", "form"}),
        ("ds_math_ministral-8b_pkpo", {"k"}),
        ("ds_knights_and_knaves_qwen2.5-7b-instruct_grpo", {"steps", "lr", "prompts_per_step", "responses_per_prompt"}),
        ("two_stage_math_qwen2.5-math-7b_gspo_n", {"low", "high", "steps"}),
        ("prorl_mixed_r1-distill-qwen-1.5b", {"coefficient", "stagnation"}),
    ],
)
def test_what_is_unknown_is_marked_on_its_line(name: str, keys: set[str]) -> None:
    assert keys <= marked(PAPER / f"{name}.yaml", "unknown")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("casp_math_qwen2.5-math-7b", {"steps", "low", "high"}),
        ("iac_deepscaler_qwen3-14b", {"lr", "alpha"}),
        ("ds_math_qwen3-1.7b", {"lr", "std"}),
        ("dapo_math_qwen2.5-32b", {"warmup_steps", "factor"}),
    ],
)
def test_what_is_derived_is_marked_on_its_line(name: str, keys: set[str]) -> None:
    assert keys <= marked(PAPER / f"{name}.yaml", "derived")


def test_every_mark_gives_its_reason() -> None:
    marks = [
        line for file in PAPER.glob("*.yaml") for line in file.read_text().splitlines() if re.search(r"#.*:$", line)
    ]
    assert marks == []


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
