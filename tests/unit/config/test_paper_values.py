"""The papers' rows hold the papers' values, and mark what no paper gives.

The tables below are written from the papers and the authors' scripts, not from the files. Where neither has a number, a
method's usual one may stand here; that it is marked in its file is always here.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import each_case

from megasharp.algos.recipe import RecipeSchedule
from megasharp.config.core import read_tree, validate
from megasharp.config.run_config import RunConfig, load_run
from megasharp.evals.suites import SuiteFile
from megasharp.tasks.problems import prompt_of, published_prompt
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.sets import SETS
from megasharp.trainer.resolve.engine_settings import check_context
from megasharp.trainer.resolve.prompt_format import asking_of
from megasharp.trainer.resolve.recipes import build_recipes

PAPER = Path(__file__).parents[3] / "configs" / "algo" / "paper"
SUITES = PAPER.parents[1] / "task"
MODELS = PAPER.parents[1] / "model"
ROWS = sorted(file.stem for file in PAPER.glob("*.yaml") if not file.name.startswith("_"))


@cache
def run_of(row: str) -> RunConfig:
    return load_run(PAPER / f"{row}.yaml")


@cache
def recipes_of(row: str) -> RecipeSchedule:
    return build_recipes(run_of(row), row)


class Printed(NamedTuple):
    """Numbers of a run as the paper, or the script where the paper has none, states them; None where neither does."""

    prompts: int | None
    responses: int | None
    mini_batch_prompts: int | None
    prompt_tokens: int | None
    response_tokens: int | None
    temperature: float | None
    lr: float | None
    steps: int | None
    eval_every: int | None
    eval_n: int | None
    eval_temperature: float | None


# Of prompts for Qwen2.5-Math-7B, where 1,024 are printed: SGLang leaves 4,090 of its 4,096 positions.
FITTED = 4090 - 3072
# By the longest of these that a row's name starts with.
PRINTED = {
    "casp_math_qwen2.5-math-7b": Printed(1024, 8, 256, FITTED, 3072, 1.0, 1e-6, None, None, 256, 0.6),
    "casp_math_llama3.2-3b-instruct": Printed(1024, 8, 256, 1024, 3072, 1.0, 1e-6, None, None, 256, 0.6),
    "casp_math_qwen2.5-32b": Printed(1024, 8, 256, 1024, 8192, 1.0, 1e-6, None, None, 128, 0.6),
    "casp_logic": Printed(128, 16, 32, 2048, 8192, 1.0, 1e-6, None, None, 128, 0.7),
    "casp_code": Printed(128, 8, 32, 2048, 8192, 0.6, 1e-6, None, None, 16, 0.7),
    "iac_": Printed(64, 8, None, None, None, None, 1e-6, 2000, 50, 8, None),
    "ds_countdown_": Printed(128, 5, 64, 2048, 8192, 1.0, None, 320, None, None, 1.0),
    "ds_countdown3_": Printed(128, 5, 64, 2048, 8192, 1.0, None, None, None, None, 1.0),
    "ds_math_qwen3-1.7b": Printed(32, 8, 16, 1024, 4096, 0.7, 5e-7, 300, None, 128, 0.7),
    "ds_math_qwen2.5-math-1.5b": Printed(32, 8, 32, 1024, 2048, 0.7, 1e-6, 1000, None, 128, 0.7),
    "ds_math_qwen2.5-math-7b": Printed(32, 8, 32, 1024, 2048, 0.7, 1e-6, 500, None, 128, 0.7),
    "ds_math_ministral-8b": Printed(32, 8, 16, 1024, 2048, 0.7, 3e-7, 300, None, 128, 0.7),
    "ds_knights_and_knaves": Printed(None, None, None, None, None, None, None, None, None, None, None),
    "two_stage_math_llama3.2-3b-instruct": Printed(1024, 8, 256, 1024, 3072, 1.0, 1e-6, None, None, 256, 0.6),
    "two_stage_math_qwen2.5-math-7b": Printed(1024, 8, 256, FITTED, 3072, 1.0, 1e-6, None, None, 256, 0.6),
    "rlvr_decomposed_math": Printed(1024, 8, 256, FITTED, 3072, 1.0, 1e-6, 20 * 7, None, 256, 0.6),
    "dapo_math": Printed(512, 16, 32, 2048, 20480, 1.0, 1e-6, None, 5, 32, 1.0),
    "forking_tokens_math": Printed(512, 16, 32, 2048, 20480, 1.0, 1e-6, None, 5, 32, 1.0),
    "clip_cov_math_qwen2.5-7b": Printed(256, 8, 32, 2048, 8192, 1.0, 5e-7, None, 4, None, 0.6),
    "clip_cov_math_qwen2.5-32b": Printed(256, 8, 32, 2048, 8192, 1.0, 1e-6, None, 4, None, 0.6),
    "kl_cov_math_qwen2.5-7b": Printed(256, 8, 32, 2048, 8192, 1.0, 5e-7, None, 4, None, 0.6),
    "kl_cov_math_qwen2.5-32b": Printed(256, 8, 32, 2048, 8192, 1.0, 1e-6, None, 4, None, 0.6),
    "unlikeliness_lean": Printed(16, 32, 8, 512, 512, None, 1e-6, 28_000 // 16, None, None, None),
    "gspo_gsm8k": Printed(512, 16, 128, 2048, 8192, 1.0, 1e-6, 500, 10, 1, 1.0),
    "gspo_math": Printed(256, 16, 32, 2048, 8192, 1.0, 1e-6, None, 10, 1, 1.0),
    "prorl_mixed": Printed(256, 16, 64, None, None, 1.2, 2e-6, 2000, None, 16, None),
}


@each_case("row", ROWS)
def test_numbers_are_the_papers(row: str) -> None:
    printed = PRINTED[max((start for start in PRINTED if row.startswith(start)), key=len)]
    run = run_of(row)
    found = Printed(
        run.data.prompts_per_step,
        run.data.responses_per_prompt,
        run.data.prompts_per_step // run.recipe.mini_batches,
        run.data.max_prompt_tokens,
        run.data.max_response_tokens,
        run.rollout.temperature,
        run.policy.optimizer.lr,
        run.steps,
        run.eval.every,
        run.eval.n,
        run.eval.temperature,
    )
    stated = {name: value for name, value in printed._asdict().items() if value is not None}
    assert {name: getattr(found, name) for name in stated} == stated


@each_case(
    ("start", "top_p", "tokens"),
    [
        # Printed is 4,096, all of the model's positions.
        ("casp_math_qwen2.5-math-7b", 0.95, 3072),
        ("casp_math_llama3.2-3b-instruct", 0.95, 4096),
        ("casp_math_qwen2.5-32b", 0.95, 8192),
        ("casp_logic", 0.95, None),
        ("casp_code", 0.95, None),
        ("two_stage", 0.95, None),
        ("ds_countdown", 0.7, None),
        ("dapo_math", 0.7, None),
        ("gspo_", 0.7, None),
    ],
)
def test_evaluations_sample_as_the_papers_do(start: str, top_p: float, tokens: int | None) -> None:
    found = {(run.eval.top_p, run.eval.max_response_tokens) for run in map(run_of, ROWS) if run.name.startswith(start)}
    assert found == {(top_p, tokens)}


# Rows of models that configs/model has no sizes of.
UNKNOWN_SIZES = ("unlikeliness_lean_deepseek-prover-v1.5-sft",)


@each_case("row", [row for row in ROWS if row not in UNKNOWN_SIZES])
def test_prompts_and_responses_fit_the_positions_that_sglang_leaves(row: str) -> None:
    """Else the row cannot start as it stands. Evaluations count, too."""
    run, memory = run_of(row), recipes_of(row).needs.memory
    for path in (run.model.path, *([memory.network.path] if memory else [])):
        sizes = json.loads((MODELS / Path(path).name.lower() / "config.json").read_text())
        check_context(run, sizes["max_position_embeddings"], row)


# Epochs of scripts whose steps no paper and no script states; the numbers of problems are those of the rows' own sets.
EPOCHS = {"casp_math_": 20, "rlvr_decomposed": 20, "two_stage": 20, "gspo_math": 10}


@each_case("row", [row for row in ROWS if row.startswith(tuple(EPOCHS))])
def test_steps_are_the_full_batches_of_the_rows_own_problems(row: str) -> None:
    """Verl, which all of these scripts run, drops what an epoch has left behind them."""
    run = run_of(row)
    epochs = next(number for start, number in EPOCHS.items() if row.startswith(start))
    problems = SETS[run.data.set or ""].expected
    assert problems is not None
    assert run.steps == epochs * (problems // run.data.prompts_per_step)


# Templates of training and of each kind of suite, by what a row's name starts with; rows of unknown sets are not here.
PROMPTS: dict[str, tuple[str, dict[str, str]]] = {
    "casp_math_qwen2.5": ("boxed_qwen", {"math": "boxed_qwen"}),
    "casp_math_llama3.2": ("boxed_llama", {"math": "boxed_llama"}),
    "casp_logic": ("chat", {"synlogic": "chat", "short_answer": "boxed_chat"}),
    "casp_code": ("deepcoder", {"code": "evalplus livecodebench"}),
    "iac_dapo17k": ("dapo", {"math": "dapo"}),
    "iac_": ("boxed_verl", {"math": "boxed_verl"}),
    "ds_countdown_": ("countdown_qwen", {"countdown_3to4": "countdown_qwen"}),
    "ds_countdown3_": ("countdown_qwen", {"countdown_3": "countdown_qwen"}),
    "ds_math": ("boxed_verl", {"math": "boxed_verl"}),
    "two_stage_math_qwen": ("boxed_chatml", {"math": "boxed_chatml", "choice": "boxed_chatml"}),
    "two_stage_math_llama": ("boxed_chat", {"math": "boxed_chat", "choice": "boxed_chat"}),
    "rlvr_decomposed": ("boxed_qwen", {"math": "boxed_qwen"}),
    "dapo_math": ("dapo", {"math": "dapo"}),
    "clip_cov": ("dapo", {"math": "dapo"}),
    "kl_cov": ("dapo", {"math": "dapo"}),
    "gspo_gsm8k": ("boxed_verl", {"math": "boxed_verl"}),
    "gspo_math": ("dapo", {"math": "dapo"}),
}


@each_case("row", [row for row in ROWS if row.startswith(tuple(PROMPTS))])
def test_suites_are_asked_as_training_is_but_for_what_the_table_says(row: str) -> None:
    run, (start, *_) = run_of(row), [start for start in PROMPTS if row.startswith(start)]
    found: dict[str, set[str]] = {}
    for name in run.eval.suites:
        suite = validate(SuiteFile, read_tree(SUITES / f"{name}.yaml"), name)
        assert suite.set and suite.prompt is None
        task = SETS[suite.set].task
        found.setdefault(task, set()).add(asking_of(run).template(task, published_prompt(suite.set, None)))
    training = prompt_of(run.data)
    assert run.data.prompt == training, "a row names its prompt"
    assert (training, {task: " ".join(sorted(names)) for task, names in found.items()}) == PROMPTS[start]
    markers = {marker for name in {training, *set().union(*found.values())} for marker in TEMPLATES[name].markers}
    other = "<|im_start|>" if "llama" in row else "<|start_header_id|>"
    assert other not in markers, "markers of another family of models"


@each_case(
    ("row", "weight_decay", "warmup_steps"),
    [
        # The scripts count steps of a whole batch of rollouts, a run file counts optimizer steps.
        ("dapo_math_qwen2.5-32b", 0.1, 10 * 16),
        ("forking_tokens_math_qwen3-14b", 0.1, 10 * 16),
        ("gspo_gsm8k_qwen2.5-3b-instruct", 0.1, round(0.05 * 500) * 4),
        ("clip_cov_math_qwen2.5-7b", 0.0, 0),
        ("kl_cov_math_qwen2.5-32b", 0.0, 0),
        ("unlikeliness_lean_deepseek-prover-v1.5-sft", 0.01, 0),
    ],
)
def test_adamw_is_the_scripts_where_it_is_known(row: str, weight_decay: float, warmup_steps: int) -> None:
    optimizer = run_of(row).policy.optimizer
    assert (optimizer.weight_decay, optimizer.warmup_steps) == (weight_decay, warmup_steps)


Values = dict[str, float | str | None]


def casp(
    alpha: float = 0.01, topn: int = 3, quantile: float = 0.8, lambda_top1: float = 1.1, omega: str = "uniform"
) -> dict[str, Values]:
    """CaSP on GRPO; defaults are those of the math runs (2510.14807 v3, E.1), the penalty is on the ratio (eq 5)."""
    values: Values = {"alpha": alpha, "topn": topn, "quantile": quantile, "lambda_top1": lambda_top1}
    return {"grpo": UNBIASED, "casp": {**values, "omega": omega, "penalty_on": "ratio"}}


def ds(gamma_p: float, gamma_n: float) -> Values:
    return {"gamma_p": gamma_p, "gamma_n": gamma_n}


UNBIASED: Values = {"std": "unbiased"}
POPULATION: Values = {"std": "population"}
CLIP: Values = {"low": 0.2, "high": 0.2, "dual": None}
GRPO: dict[str, Values] = {"grpo": UNBIASED, "clip": CLIP}
LOGIC: dict[str, Values] = {"dynamic_sampling": {}, "clip": {"high": 0.28, "dual": None}}
CODE: dict[str, Values] = {"clip": {"dual": None}}
IAC: Values = {"alpha": 1.0}
IAC_GRPO: dict[str, Values] = {"grpo": UNBIASED, "kl": {}, "clip": {}}
IAC_TABLE_2: dict[str, dict[str, Values]] = {
    "": {**IAC_GRPO, "iac": IAC},
    "_grpo": IAC_GRPO,
    "_rloo": {"rloo": {}, "kl": {}, "clip": {}},
    "_reinforce_pp_baseline": {"reinforce_pp_baseline": {}, "kl": {}, "clip": {}},
    "_dr_grpo": {"dr_grpo": {}, "clip": {}},
}
IAC_DAPO: dict[str, Values] = {
    "dapo": {},
    "grpo": UNBIASED,
    "clip": {},
    "dynamic_sampling": {},
    "soft_overlong": {"factor": 0.5},
}
COUNTDOWN: dict[str, Values] = {"kl": {"form": "k3"}, "entropy_bonus": {"coefficient": 0.001}, "clip": CLIP}
DS_MATH: dict[str, Values] = {"clip": {"low": 0.2, "high": 0.25, "dual": 3.0}}
MINISTRAL: dict[str, Values] = {
    "kl": {"coefficient": 0.001, "form": "k3"},
    "clip": {"low": 0.2, "high": 0.22, "dual": 3.0},
}
TWO_STAGE: dict[str, Values] = {
    "grpo": UNBIASED,
    "kl": {"coefficient": 1e-3, "form": "k3"},
    "entropy_bonus": {"coefficient": 1e-4},
    "clip": CLIP,
}
ZHU: dict[str, Values] = {"entropy_bonus": {"coefficient": 0.001}, "clip": CLIP}
DAPO: dict[str, Values] = {
    "dapo": {},
    "grpo": UNBIASED,
    "clip": {"low": 0.2, "high": 0.28, "dual": 10.0},
    "dynamic_sampling": {"max_rounds": 10},
    "soft_overlong": {"max_tokens": 20480, "cache_tokens": 4096, "factor": 0.5},
}
COVARIANCE: dict[str, Values] = {"grpo": UNBIASED, "dynamic_sampling": {"max_rounds": 10}}
CLIP_COV: dict[str, Values] = {
    "clip": {"low": 1.0, "high": 1.0, "dual": 10.0},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
}
GSPO: dict[str, Values] = {
    "grpo": UNBIASED,
    "gspo": {"level": "sequence"},
    "clip": {"low": 3e-4, "high": 4e-4, "dual": None},
}

METHODS: dict[str, dict[str, Values]] = {
    "casp_math_qwen2.5-math-7b": {**casp(), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_alpha0.02": {**casp(alpha=0.02), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_alpha0.03": {**casp(alpha=0.03), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_alpha0.05": {**casp(alpha=0.05), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_alpha0.1": {**casp(alpha=0.1), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_quantile0.0": {**casp(quantile=0.0), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_quantile0.4": {**casp(quantile=0.4), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_quantile0.6": {**casp(quantile=0.6), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_topn1": {**casp(topn=1), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_topn2": {**casp(topn=2), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_topn4": {**casp(topn=4), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_topn5": {**casp(topn=5), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_without_negative": {**casp(lambda_top1=1.0), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_without_positive": {**casp(alpha=0.0), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_softmax": {**casp(omega="softmax"), "clip": CLIP},
    "casp_math_qwen2.5-math-7b_grpo": GRPO,
    "casp_math_qwen2.5-math-7b_psr": {"psr": {}, "clip": CLIP},
    "casp_math_qwen2.5-math-7b_nsr": {"nsr": {}, "clip": CLIP},
    "casp_math_qwen2.5-math-7b_w_reinforce": {"w_reinforce": {"positive_weight": 0.1}, "clip": CLIP},
    "casp_math_qwen2.5-math-7b_kl_cov": {"grpo": UNBIASED, "kl_cov": {"share": 0.002, "coefficient": 1.0}},
    "casp_math_qwen2.5-math-7b_passk_training": {"passk_training": {}, "clip": CLIP},
    "casp_math_qwen2.5-math-7b_entropy_bonus": {**GRPO, "entropy_bonus": {"coefficient": 0.01}},
    "casp_math_qwen2.5-math-7b_entropy_adv": {**GRPO, "entropy_adv": {"a": 0.4, "kappa": 2.0}},
    "casp_math_qwen2.5-math-7b_forking_tokens": {**GRPO, "forking_tokens": {"share": 0.2}},
    "casp_math_qwen2.5-32b_alpha0.01": {**casp(alpha=0.01), "clip": CLIP},
    "casp_math_qwen2.5-32b_alpha0.05": {**casp(alpha=0.05), "clip": CLIP},
    "casp_math_qwen2.5-32b_grpo": GRPO,
    "casp_math_qwen2.5-32b_entropy_bonus": {**GRPO, "entropy_bonus": {"coefficient": 0.01}},
    "casp_math_llama3.2-3b-instruct": {**casp(), "clip": CLIP},
    "casp_math_llama3.2-3b-instruct_grpo": GRPO,
    "casp_math_llama3.2-3b-instruct_psr": {"psr": {}, "clip": CLIP},
    "casp_math_llama3.2-3b-instruct_nsr": {"nsr": {}, "clip": CLIP},
    "casp_math_llama3.2-3b-instruct_w_reinforce": {"w_reinforce": {"positive_weight": 0.1}, "clip": CLIP},
    "casp_logic_qwen2.5-7b": {**casp(alpha=0.005, lambda_top1=1.05), **LOGIC},
    "casp_logic_qwen2.5-7b_grpo": {"grpo": UNBIASED, **LOGIC},
    "casp_logic_qwen2.5-7b_psr": {"psr": {}, **LOGIC},
    "casp_logic_qwen2.5-7b_w_reinforce": {"w_reinforce": {"positive_weight": 0.1}, **LOGIC},
    "casp_code_r1-distill-qwen-7b": {**casp(alpha=0.05), **CODE},
    "casp_code_r1-distill-qwen-7b_grpo": {"grpo": UNBIASED, **CODE},
    **{f"iac_deepscaler_qwen3-{size}{row}": IAC_TABLE_2[row] for size in ("4b", "8b", "14b") for row in IAC_TABLE_2},
    "iac_deepscaler_qwen3-8b_alpha0.5": {**IAC_GRPO, "iac": {"alpha": 0.5}},
    "iac_deepscaler_qwen3-8b_alpha1.5": {**IAC_GRPO, "iac": {"alpha": 1.5}},
    "iac_deepscaler_qwen3-8b_alpha2.0": {**IAC_GRPO, "iac": {"alpha": 2.0}},
    "iac_deepscaler_qwen3-8b_filtering": {
        **IAC_GRPO,
        "difficulty_filter": {"drop_easiest": 0.25, "low": None, "high": None},
    },
    "iac_deepscaler_qwen3-8b_dapo": IAC_DAPO,
    "iac_deepscaler_qwen3-8b_dapo_iac": {**IAC_DAPO, "iac": IAC},
    "iac_deepscaler_qwen3-8b_dapo_iac_dlc": {**IAC_DAPO, "iac": IAC, "dlc": {"plausible": None}},
    "iac_dapo17k_r1-distill-qwen-1.5b": {**IAC_GRPO, "iac": IAC},
    "iac_dapo17k_r1-distill-qwen-1.5b_grpo": IAC_GRPO,
    "iac_dapo17k_r1-distill-qwen-1.5b_dapo": IAC_DAPO,
    "ds_countdown_qwen2.5-3b-instruct": {"grpo": POPULATION, "ds": ds(0.03, 0.01), **COUNTDOWN},
    "ds_countdown_qwen2.5-3b-instruct_grpo": {"grpo": POPULATION, **COUNTDOWN},
    "ds_countdown_qwen2.5-3b-instruct_entropy_bonus": {"grpo": POPULATION, **COUNTDOWN, "entropy_bonus": {}},
    "ds_countdown_qwen2.5-3b-instruct_entropy_penalty": {
        "grpo": POPULATION,
        "kl": {"form": "k3"},
        "entropy_penalty": {},
        "clip": CLIP,
    },
    "ds_countdown_qwen2.5-3b-instruct_unlikeliness": {"grpo": POPULATION, "unlikeliness": {}, **COUNTDOWN},
    "ds_countdown_qwen2.5-3b-instruct_gr_pkpo": {"gr_pkpo": {}, **COUNTDOWN},
    "ds_countdown3_qwen2.5-3b-instruct_grpo": {"grpo": POPULATION, **COUNTDOWN},
    "ds_countdown3_qwen2.5-3b-instruct_entropy_bonus": {"grpo": POPULATION, **COUNTDOWN, "entropy_bonus": {}},
    "ds_math_qwen3-1.7b": {"grpo": POPULATION, "ds": ds(0.02, 0.002), **DS_MATH},
    "ds_math_qwen3-1.7b_grpo": {"grpo": POPULATION, **DS_MATH},
    "ds_math_qwen2.5-math-1.5b": {"grpo": POPULATION, "ds": ds(0.01, 0.01), **DS_MATH},
    "ds_math_qwen2.5-math-1.5b_grpo": {"grpo": POPULATION, **DS_MATH},
    "ds_math_qwen2.5-math-1.5b_positive": {"grpo": POPULATION, "ds": ds(0.01, 0.0), **DS_MATH},
    "ds_math_qwen2.5-math-1.5b_negative": {"grpo": POPULATION, "ds": ds(0.0, 0.01), **DS_MATH},
    "ds_math_qwen2.5-math-1.5b_cispo": {"grpo": POPULATION, "cispo": {}},
    "ds_math_qwen2.5-math-7b": {"grpo": POPULATION, "ds": ds(0.01, 0.01), **DS_MATH},
    "ds_math_qwen2.5-math-7b_grpo": {"grpo": POPULATION, **DS_MATH},
    "ds_math_ministral-8b": {"grpo": POPULATION, "ds": ds(0.02, 0.002), **MINISTRAL},
    "ds_math_ministral-8b_grpo": {"grpo": POPULATION, **MINISTRAL},
    "ds_math_ministral-8b_entropy_bonus": {"grpo": POPULATION, "entropy_bonus": {}, **MINISTRAL},
    "ds_math_ministral-8b_entropy_penalty": {"grpo": POPULATION, "entropy_penalty": {}, **MINISTRAL},
    "ds_math_ministral-8b_unlikeliness": {"grpo": POPULATION, "unlikeliness": {}, **MINISTRAL},
    "ds_math_ministral-8b_pkpo": {"pkpo": {"form": "fork"}, **MINISTRAL},
    "ds_math_ministral-8b_gr_pkpo": {"gr_pkpo": {}, **MINISTRAL},
    "ds_knights_and_knaves_qwen2.5-7b-instruct_grpo": {"grpo": POPULATION, "kl": {}, "clip": {}},
    "ds_knights_and_knaves_qwen2.5-7b-instruct_entropy_bonus": {
        "grpo": POPULATION,
        "kl": {},
        "entropy_bonus": {},
        "clip": {},
    },
    "two_stage_math_qwen2.5-math-7b_grpo": TWO_STAGE,
    "two_stage_math_qwen2.5-math-7b_grpo_n": {**TWO_STAGE, "grpo_n": {}, "negative_only": {"positive_weight": 0.0}},
    "two_stage_math_qwen2.5-math-7b_gspo": {**TWO_STAGE, "gspo": {"level": "sequence"}},
    "two_stage_math_qwen2.5-math-7b_gspo_n": {
        **TWO_STAGE,
        "gspo_n": {},
        "gspo": {"level": "sequence"},
        "negative_only": {"positive_weight": 0.0},
    },
    "two_stage_math_llama3.2-3b-instruct_grpo": TWO_STAGE,
    "two_stage_math_llama3.2-3b-instruct_grpo_n": {
        **TWO_STAGE,
        "grpo_n": {},
        "negative_only": {"positive_weight": 0.0},
    },
    "rlvr_decomposed_math_qwen2.5-math-7b_psr": {"psr": {}, **ZHU},
    "rlvr_decomposed_math_qwen2.5-math-7b_nsr": {"nsr": {}, **ZHU},
    "rlvr_decomposed_math_qwen2.5-math-7b_w_reinforce": {"w_reinforce": {"positive_weight": 0.1}, **ZHU},
    "rlvr_decomposed_math_qwen2.5-math-7b_grpo": {
        "grpo": UNBIASED,
        "kl": {"coefficient": 0.001, "form": "k3"},
        **ZHU,
    },
    "dapo_math_qwen2.5-32b": DAPO,
    "forking_tokens_math_qwen3-14b": {**DAPO, "forking_tokens": {"share": 0.2}},
    "forking_tokens_math_qwen3-14b_dapo": DAPO,
    "clip_cov_math_qwen2.5-7b": {**COVARIANCE, **CLIP_COV},
    "clip_cov_math_qwen2.5-32b": {**COVARIANCE, **CLIP_COV},
    # The scripts count this share in percent.
    "kl_cov_math_qwen2.5-7b": {**COVARIANCE, "kl_cov": {"share": 0.2 / 100, "coefficient": 1.0}},
    "kl_cov_math_qwen2.5-32b": {**COVARIANCE, "kl_cov": {"share": 0.02 / 100, "coefficient": 1.0}},
    "unlikeliness_lean_deepseek-prover-v1.5-sft": {
        "grpo": UNBIASED,
        "unlikeliness": {"beta": 0.25, "form": "code"},
        "kl": {"coefficient": 0.1, "form": "k3"},
        "clip": {},
    },
    "gspo_gsm8k_qwen2.5-3b-instruct": GSPO,
    "gspo_math_qwen3-30b-a3b-base": GSPO,
    "prorl_mixed_r1-distill-qwen-1.5b": {
        "grpo": UNBIASED,
        "dynamic_sampling": {},
        "kl": {},
        "clip": {"low": 0.2, "high": 0.4},
    },
}


def test_the_table_of_methods_names_every_row() -> None:
    assert sorted(METHODS) == ROWS


@each_case("row", METHODS)
def test_methods_and_their_values_are_the_papers(row: str) -> None:
    methods = recipes_of(row).final.methods
    assert set(methods) == set(METHODS[row])
    found = {name: dict(methods[name].params) for name in methods}
    assert {name: {key: found[name][key] for key in values} for name, values in METHODS[row].items()} == {
        name: pytest.approx(values) for name, values in METHODS[row].items()
    }


@each_case(("start", "reduction"), [("casp_", "token_mean"), ("two_stage_", "seq_mean_token_mean")])
def test_a_papers_rows_share_a_reduction(start: str, reduction: str) -> None:
    """A row of another reduction than its baselines' would show that difference too."""
    assert {run_of(row).recipe.reduction for row in ROWS if row.startswith(start)} == {reduction}


@each_case("row", [row for row in ROWS if row.startswith("ds_countdown")])
def test_countdown_has_three_levels_of_reward_and_evaluates_with_top_k(row: str) -> None:
    """TinyZero's levels (2511.19942, C.1, says which there are), and the top-k of the table of appendix C.3."""
    levels, evaluation = run_of(row).reward.levels, run_of(row).eval
    assert levels is not None and (levels.correct, levels.well_formed, levels.other) == (1.0, 0.1, 0.0)
    assert (evaluation.top_k, evaluation.top_p, evaluation.temperature) == (50, 0.7, 1.0)


def test_logic_runs_warm_up_with_grpo() -> None:
    recipes = recipes_of("casp_logic_qwen2.5-7b")
    assert ["casp" in recipes.at(step).methods for step in (1, 50, 51, 130)] == [False, False, True, True]


def test_the_memory_network_learns_at_the_policys_rate() -> None:
    row = "iac_deepscaler_qwen3-8b_dapo_iac_dlc"
    memory = recipes_of(row).final.methods["dlc"].params.memory
    assert memory.path == "Qwen/Qwen3-1.7B"
    assert memory.lr == run_of(row).policy.optimizer.lr


class Marks(NamedTuple):
    """Keys of a file's marked lines, in its order; `-` is a mark on a line of its own."""

    unknown: str = ""
    derived: str = ""


WEIGHT = Marks("positive_weight")
COEFFICIENT = Marks("coefficient")
REDUCTION = Marks("", "reduction")
DAPO_PARTS = "clip dynamic_sampling max_tokens cache_tokens"
MARKS = {
    "_verl": Marks("dtype betas weight_decay clip_grad warmup_steps decay"),
    "_casp_math": Marks("every", "- steps set prompt top_p reduction low high"),
    "_casp_math_llama3.2-3b-instruct": Marks("", "steps set prompt"),
    "_casp_math_qwen2.5-math-7b": Marks("", "max_prompt_tokens max_response_tokens"),
    "_casp_math_qwen2.5-32b": Marks("steps"),
    "_casp_logic": Marks("- steps prompt top_p low max_rounds every", "reduction"),
    "casp_logic_qwen2.5-7b": Marks("quantile"),
    "casp_code_r1-distill-qwen-7b": Marks("quantile"),
    "_casp_code": Marks("- steps top_p low high every prompt", "prompt reduction"),
    "casp_math_qwen2.5-math-7b_softmax": Marks("", "omega"),
    "casp_math_qwen2.5-math-7b_w_reinforce": WEIGHT,
    "casp_math_qwen2.5-math-7b_kl_cov": Marks("share coefficient"),
    "casp_math_qwen2.5-math-7b_passk_training": Marks("k"),
    "casp_math_qwen2.5-math-7b_entropy_adv": Marks("a kappa"),
    "casp_math_qwen2.5-math-7b_forking_tokens": Marks("share"),
    "casp_math_llama3.2-3b-instruct_w_reinforce": WEIGHT,
    "casp_logic_qwen2.5-7b_w_reinforce": WEIGHT,
    "_iac": Marks(
        "max_prompt_tokens max_response_tokens temperature top_p mini_batches reduction low high dual coefficient form "
        "form temperature top_p",
        "lr prompt alpha",
    ),
    **{f"iac_deepscaler_qwen3-{size}_dr_grpo": REDUCTION for size in ("4b", "8b", "14b")},
    **{
        f"iac_deepscaler_qwen3-{size}_{estimator}": Marks("kl")
        for size in ("4b", "8b", "14b")
        for estimator in ("rloo", "reinforce_pp_baseline")
    },
    "iac_deepscaler_qwen3-8b_filtering": Marks("max_rounds", "path low high"),
    "iac_deepscaler_qwen3-8b_dapo": Marks(DAPO_PARTS, "path factor"),
    "iac_deepscaler_qwen3-8b_dapo_iac_dlc": Marks("- mu path", "lr"),
    "iac_dapo17k_r1-distill-qwen-1.5b_dapo": Marks(DAPO_PARTS, "factor"),
    "_iac_dapo17k": Marks("", "prompt"),
    "_ds_countdown": Marks("lr correct well_formed other top_p coefficient every n", "prompt reduction std form"),
    "ds_countdown_qwen2.5-3b-instruct": Marks("form"),
    "ds_countdown_qwen2.5-3b-instruct_entropy_bonus": COEFFICIENT,
    "ds_countdown_qwen2.5-3b-instruct_entropy_penalty": COEFFICIENT,
    "ds_countdown_qwen2.5-3b-instruct_unlikeliness": Marks("beta form"),
    "ds_countdown_qwen2.5-3b-instruct_gr_pkpo": Marks("k"),
    "ds_countdown3_qwen2.5-3b-instruct_grpo": Marks("steps n"),
    "ds_countdown3_qwen2.5-3b-instruct_entropy_bonus": Marks("steps n coefficient"),
    "_ds_math": Marks("form every", "prompt top_p std dual"),
    "_ds_math_qwen3-1.7b": Marks("", "lr"),
    "_ds_math_qwen2.5-math-1.5b": Marks("", "lr"),
    "_ds_math_qwen2.5-math-7b": Marks("", "lr"),
    "_ds_math_ministral-8b": Marks("", "path lr coefficient form"),
    "ds_math_qwen2.5-math-1.5b_positive": Marks("path"),
    "ds_math_qwen2.5-math-1.5b_negative": Marks("path"),
    "ds_math_qwen2.5-math-1.5b_cispo": Marks("low high"),
    "ds_math_ministral-8b_pkpo": Marks("k", "form"),
    "ds_math_ministral-8b_gr_pkpo": Marks("k"),
    "ds_math_ministral-8b_unlikeliness": Marks("beta form"),
    "ds_math_ministral-8b_entropy_bonus": COEFFICIENT,
    "ds_math_ministral-8b_entropy_penalty": COEFFICIENT,
    "_ds_knights_and_knaves": Marks(
        "steps rank alpha targets lr prompts_per_step responses_per_prompt max_prompt_tokens max_response_tokens "
        "temperature top_p mini_batches reduction low high coefficient form every n temperature top_p "
        "top_k",
        "std",
    ),
    "ds_knights_and_knaves_qwen2.5-7b-instruct_entropy_bonus": COEFFICIENT,
    "_two_stage": Marks("steps every suites", "max_prompt_tokens max_response_tokens top_p form"),
    "_two_stage_qwen2.5-math-7b": Marks("", "max_prompt_tokens"),
    "two_stage_math_qwen2.5-math-7b_gspo": Marks("low high"),
    "two_stage_math_qwen2.5-math-7b_gspo_n": Marks("low high"),
    "two_stage_math_llama3.2-3b-instruct_grpo": Marks("prompt prompt"),
    "two_stage_math_llama3.2-3b-instruct_grpo_n": Marks("prompt prompt"),
    "_rlvr_decomposed": Marks("", "steps prompt max_prompt_tokens coefficient"),
    "dapo_math_qwen2.5-32b": Marks("", "prompt"),
    "_dapo_20k": Marks("steps", "warmup_steps factor n"),
    "forking_tokens_math_qwen3-14b": Marks("", "task"),
    "forking_tokens_math_qwen3-14b_dapo": Marks("", "task"),
    "_entropy_mechanism": Marks("steps n", "set prompt"),
    "unlikeliness_lean_deepseek-prover-v1.5-sft": Marks(
        "temperature top_p low high every n temperature", "steps mini_batches reduction form"
    ),
    "gspo_gsm8k_qwen2.5-3b-instruct": Marks("prompt"),
    "gspo_math_qwen3-30b-a3b-base": Marks("", "steps prompt"),
    "prorl_mixed_r1-distill-qwen-1.5b": Marks(
        "max_prompt_tokens max_response_tokens max_response_tokens top_p reduction dual max_rounds coefficient form "
        "metric patience min_improvement every suites temperature",
        "until",
    ),
}
MARKED_LINE = re.compile(r"(?:\s*(?P<key>\w+): \S.*  )?# (?P<mark>unknown|derived): .*[A-Za-z]{3}")


def marks_of(file: Path) -> Marks:
    found = [match for line in file.read_text().splitlines() if (match := MARKED_LINE.match(line))]
    keys = {mark: " ".join(m["key"] or "-" for m in found if m["mark"] == mark) for mark in Marks._fields}
    return Marks(**keys)


def test_what_no_paper_gives_is_marked_on_its_line() -> None:
    found = {file.stem: marks_of(file) for file in PAPER.glob("*.yaml")}
    assert {name: marks for name, marks in found.items() if marks != Marks()} == MARKS


@each_case("mark", ["unknown", "derived"])
def test_every_mark_has_a_value_before_it_and_a_reason_after_it(mark: str) -> None:
    lines = [line for file in PAPER.glob("*.yaml") for line in file.read_text().splitlines()]
    marked = [line for line in lines if re.search(rf"#\s*{mark}\b", line)]
    assert len(marked) > len(MARKS) / 2
    assert [line for line in marked if not MARKED_LINE.match(line)] == []
