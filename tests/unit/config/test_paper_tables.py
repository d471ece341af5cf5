"""Every table and figure of the four papers has its runs in the README of `configs/algo/paper`, or a reason there.

The rows below are written from the papers, by the methods and models that they print, not from the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cases import each_case

from tests.unit.config.test_paper_values import PAPER, ROWS

README = (PAPER / "README.md").read_text()
QWEN_MATH, LLAMA, QWEN_32B = "qwen2.5-math-7b", "llama3.2-3b-instruct", "qwen2.5-32b"
# Methods as the names of files end; a paper's own method, or its whole, has no ending.
OWN = ""


def files(start: str, *methods: str) -> set[str]:
    return {f"{start}_{method}" if method else start for method in methods}


CASP_MATH, CASP_LLAMA = f"casp_math_{QWEN_MATH}", f"casp_math_{LLAMA}"
COUNTDOWN, COUNTDOWN3 = "ds_countdown_qwen2.5-3b-instruct", "ds_countdown3_qwen2.5-3b-instruct"
MINISTRAL, MATH_1B = "ds_math_ministral-8b", "ds_math_qwen2.5-math-1.5b"
TWO_STAGE = f"two_stage_math_{QWEN_MATH}"
# The runs that each place shows; models without training, and repeats of another place's picture, are none.
TRAINED: dict[str, dict[str, set[str]]] = {
    "2510.14807": {
        "Table 1": files(CASP_MATH, "grpo", "psr", "nsr", "w_reinforce", "kl_cov", "passk_training")
        | files(CASP_MATH, "entropy_bonus", "entropy_adv", "forking_tokens", OWN)
        | files(f"casp_math_{QWEN_32B}", "grpo", "entropy_bonus", "alpha0.01", "alpha0.05")
        | files(CASP_LLAMA, "grpo", "psr", "nsr", "w_reinforce", OWN),
        "Table 2": files("casp_logic_qwen2.5-7b", "grpo", "psr", "w_reinforce", OWN),
        "Table 3": files("casp_code_r1-distill-qwen-7b", "grpo", OWN),
        "Table 4": files(CASP_MATH, "grpo", "alpha0.02", "alpha0.03", "alpha0.05", "alpha0.1", OWN)
        | files(CASP_MATH, "quantile0.0", "quantile0.4", "quantile0.6", "topn1", "topn2", "topn4", "topn5")
        | files(CASP_MATH, "without_negative", "without_positive"),
        "Table 6": files(CASP_MATH, "grpo", "softmax", OWN),
        "Figure 3": files(CASP_LLAMA, "grpo", "psr", "nsr", OWN) | files(CASP_MATH, "grpo", "psr", "nsr", OWN),
    },
    "2601.15609": {
        "Table 2": {
            name
            for size in ("4b", "8b", "14b")
            for name in files(f"iac_deepscaler_qwen3-{size}", "grpo", "rloo", "reinforce_pp_baseline", "dr_grpo", OWN)
        },
        "Table 3": files("iac_deepscaler_qwen3-8b", "dapo", OWN, "dapo_iac", "dapo_iac_dlc"),
        "Table 4": files("iac_dapo17k_r1-distill-qwen-1.5b", "grpo", "dapo", OWN),
        "Table 5": files("iac_deepscaler_qwen3-8b", "grpo", "alpha0.5", OWN, "alpha1.5", "alpha2.0", "filtering"),
    },
    "2511.19942": {
        "Figure 2": files(COUNTDOWN, "grpo", OWN),
        "Figure 3": {
            name
            for model in (MINISTRAL, MATH_1B, f"ds_math_{QWEN_MATH}", "ds_math_qwen3-1.7b")
            for name in files(model, "grpo", OWN)
        },
        "Figure 4": files(COUNTDOWN, "grpo", "entropy_bonus", "entropy_penalty", "unlikeliness", OWN)
        | files(MINISTRAL, "grpo", "pkpo", "gr_pkpo", "unlikeliness", "entropy_bonus", "entropy_penalty", OWN),
        "Figure 5": files(COUNTDOWN, "grpo", "entropy_bonus", "entropy_penalty", "unlikeliness", OWN),
        "Figure 7": files(MATH_1B, "grpo", "positive", "negative", OWN),
        "Figure 8": files(MATH_1B, "cispo", OWN),
        "Table 7": files("ds_knights_and_knaves_qwen2.5-7b-instruct", "grpo", "entropy_bonus")
        | files(COUNTDOWN3, "grpo", "entropy_bonus")
        | files(COUNTDOWN, "grpo", "entropy_bonus"),
    },
    "2510.04028": {
        "Table 1": files(TWO_STAGE, "grpo", "grpo_n", "gspo", "gspo_n"),
        "Table 2": files(f"two_stage_math_{LLAMA}", "grpo", "grpo_n"),
        "Table 3": files(TWO_STAGE, "grpo", "grpo_n", "gspo", "gspo_n"),
    },
}
# How many tables and figures each paper has.
NUMBERS = {"2510.14807": (7, 16), "2601.15609": (5, 7), "2511.19942": (7, 8), "2510.04028": (4, 7)}
# Tried by a paper that shows no figures of it.
WITHOUT_A_PLACE = files(COUNTDOWN, "gr_pkpo")


def places(text: str) -> Iterator[str]:
    """Tables and figures that a text names: `Table 1` and `Table 3` of "Tables 1 and 3"."""
    for kind, numbers in re.findall(r"(Table|Figure)s? (\d+(?:(?:, | and )\d+)*)", text):
        yield from (f"{kind} {number}" for number in re.findall(r"\d+", numbers))


def runs_in_readme() -> dict[str, dict[str, set[str]]]:
    """Runs by paper and place: the rows of the tables, and the overrides that name a place."""
    listed = re.findall(r"^\| \[`([^`]+)`\]\([^)]+\) \| ([\d.]+) \| ([^|]+) \|", README, re.MULTILINE)
    variants = re.findall(r"^\| ([\d.]+), ([^|`]+) \| `([^`]+)` \| `[^|]+` \|$", README, re.MULTILINE)
    found: dict[str, dict[str, set[str]]] = {paper: {} for paper in TRAINED}
    for name, paper, row in [*listed, *((name, paper, row) for paper, row, name in variants)]:
        for place in places(row) if paper in found else ():
            found[paper].setdefault(place, set()).add(name)
    return found


def left_out() -> dict[str, set[str]]:
    """Places by paper that the list of what is left out begins with."""
    found: dict[str, set[str]] = {paper: set() for paper in TRAINED}
    _, _, section = README.partition("## Left out\n")
    for paper, row in re.findall(r"^- ([\d.]+), ([^:]+):", section, re.MULTILINE):
        found[paper] |= set(places(row))
    return found


@each_case("paper", TRAINED)
def test_each_place_has_the_runs_that_the_paper_shows_there(paper: str) -> None:
    assert runs_in_readme()[paper] == TRAINED[paper]


@each_case("paper", TRAINED)
def test_no_table_or_figure_is_forgotten(paper: str) -> None:
    tables, figures = NUMBERS[paper]
    every = {f"Table {i + 1}" for i in range(tables)} | {f"Figure {i + 1}" for i in range(figures)}
    assert TRAINED[paper].keys() | left_out()[paper] == every


def test_every_row_of_the_papers_is_shown_somewhere() -> None:
    shown = {name for shows in TRAINED.values() for runs in shows.values() for name in runs}
    assert shown <= set(ROWS)
    of_papers = tuple(f"{start}_" for start in ("casp", "iac", "ds", "two_stage"))
    assert {row for row in ROWS if row.startswith(of_papers)} - shown == WITHOUT_A_PLACE
