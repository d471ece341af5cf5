"""Problems that reasoning-gym generates (2505.24760): a YAML file names data sets, their sizes, seeds and options.

    datasets:
      - {name: chain_sum, size: 2000, seed: 1, config: {max_terms: 4}}
      - {name: knights_knaves, size: 1000, seed: 1}

Problems are generated again at every start: the same file gives the same problems with the same version of the library.

The verifier is the library's own `score_answer`. A problem is a place in a generated data set: the judge generates it
again, so that nothing but four values and a number travels to worker processes. The scorers are the library's: those
of `EVALUATED` hand what a model wrote to eval or to sympy, which calls it, and a worker has this user's rights. So
answers to those are refused unread where they call anything but a function of mathematics; and this verifier runs in
worker processes alone (`trainer/reward_judge.py`), which end what takes too long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.common.section import Section
from megasharp.config.core import read_tree, validate
from megasharp.tasks.extraction import last_tag
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import TEMPLATES


class GymEntry(Section):
    """One data set, and how much of it; `config` are its own options."""

    name: str = Field(description="Name of the data set in reasoning-gym, such as chain_sum.")
    size: int = Field(default=500, ge=1, description="Number of problems to generate.")
    seed: int = Field(
        default=1,
        ge=0,
        description="Seed of the problems. The same name may be listed again with another seed.",
    )
    config: dict[str, JsonValue] = Field(
        default={},
        description="Options of the data set, by reasoning-gym's own names. Empty: its defaults.",
    )


class GymFile(Section):
    """The file."""

    datasets: list[GymEntry] = Field(
        min_length=1,
        description="Data sets to generate problems from, each with its size, seed and options.",
    )


@dataclass(frozen=True, slots=True)
class GymRecord:
    """One generated problem. The id is the data set's name, seed and the problem's number."""

    id: str
    question: str
    answer: GymAnswer


def read_records(path: Path) -> list[GymRecord]:
    """Generate the problems that a file names.

    Raises UserError, naming the file, for a missing or odd file, for a name or option that the library does not have,
    and for the same name and seed twice.
    """
    records = [record for dataset in read_datasets(path) for record in _problems(dataset, path)]
    if len({record.id for record in records}) < len(records):
        raise UserError(f"{path}: datasets: a name with the same seed twice; give each its own seed")
    return records


def read_datasets(path: Path) -> list[GymDataset]:
    """The data sets of a file, nothing generated yet."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; data.path must be a YAML file with 'datasets'")
    file = validate(GymFile, read_tree(path), str(path), path)
    return [
        GymDataset(entry.name, entry.size, entry.seed, json.dumps(entry.config, sort_keys=True))
        for entry in file.datasets
    ]


def _problems(dataset: GymDataset, path: Path) -> Iterator[GymRecord]:
    try:
        generated(dataset)
        for index in range(dataset.size):
            answer = GymAnswer(dataset, index)
            yield GymRecord(f"{dataset.name}-{dataset.seed}-{index:05d}", str(problem(answer)["question"]), answer)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # a generator of the library's may raise anything
        raise UserError(
            f"{path}: reasoning-gym's {dataset.name} cannot generate a problem ({one_line(error)}); change its config"
        ) from error


MAX_LENGTH = 10_000
MAX_CANONICAL = 1_000
# In version 0.1.25: every scorer that evaluates the answer, found by reading them and by trying a call on all.
EVALUATED = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS = frozenset(
    {"exp", "log", "ln", "sqrt", "Abs", "abs"}
    | {f"{arc}{name}{hyperbolic}" for arc in ("", "a") for name in _TRIGONOMETRIC for hyperbolic in ("", "h")}
)
_BEFORE_PARENTHESIS = re.compile(r"(\w+|[^\w\s])?\s*\(")
_OPERATORS = frozenset("+-*/^%,([{=<>|&")
_ATTRIBUTE = re.compile(r"__|\.\s*[^\W\d]|[\\;`#]")


@dataclass(frozen=True, slots=True)
class GymDataset:
    """A generated data set: its name in reasoning-gym, how many problems, their seed, its options as a JSON text.

    Example: `GymDataset("chain_sum", 500, 1, '{"max_terms": 4}')`.
    """

    name: str
    size: int
    seed: int
    config: str = "{}"


@dataclass(frozen=True, slots=True)
class GymAnswer(TaskAnswer):
    """Problem `index`, from 0, of a data set. Example: `GymAnswer(GymDataset("chain_sum", 500, 1), 17)`."""

    dataset: GymDataset
    index: int


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Score the text in the last answer tags, between 0 and 1. CORRECT is a score of 1, and nothing below.

    FORMAT with reward 0: no answer tags (some scorers give 0.01 for that), or nothing or too much in them. WRONG keeps
    its score as the reward, which for many data sets is above 0 for a part of the answer, or for any answer at all. The
    canonical answer is the text with single spaces. A scorer's exceptions pass through, and so does ValueError for a
    score outside of 0 to 1.

    Example: `verify("<answer>7</answer>", answer)` of "3 + 4 = ?" is `Verdict(Outcome.CORRECT, 1.0, "7", "")`.
    """
    assert isinstance(answer, GymAnswer)
    given = last_tag(text)
    if not given or len(given) > MAX_LENGTH:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer tags, or nothing or too much in them")
    if answer.dataset.name in EVALUATED and calls(given):
        return Verdict(Outcome.FORMAT, 0.0, None, "the answer calls something, and its scorer would evaluate it")
    score = float(generated(answer.dataset).score_answer(answer=given, entry=problem(answer)))
    if not (math.isfinite(score) and 0.0 <= score <= 1.0 + 1e-9):
        raise ValueError(f"reasoning-gym's {answer.dataset.name} scored {score}, which is not between 0 and 1")
    canonical = " ".join(given.split())[:MAX_CANONICAL]
    if score >= 1.0:
        return Verdict(Outcome.CORRECT, 1.0, canonical)
    return Verdict(Outcome.WRONG, score, canonical, f"score {score:.3g}" if score else "")


def calls(text: str) -> bool:
    """Find an attribute in a text, or a call of anything but a function of mathematics, as Python would.

    Example: `calls("sin(x)*(x+1)")` is False, `calls("exec(x)")`, `calls("[f][0](x)")` and `calls("x.f")` are True.
    """
    before = (match[1] for match in _BEFORE_PARENTHESIS.finditer(text))
    return bool(_ATTRIBUTE.search(text)) or any(
        each is not None and each not in _OPERATORS and each not in _FUNCTIONS for each in before
    )


@lru_cache(maxsize=4096)
def problem(answer: GymAnswer) -> Mapping[str, Any]:
    """The library's entry: `question`, `answer`, `metadata`."""
    entry: Mapping[str, Any] = generated(answer.dataset)[answer.index]
    return entry


@lru_cache(maxsize=128)
def generated(dataset: GymDataset) -> Any:
    """The library's data set. Raises UserError for a name or an option that it does not have."""
    library = load_library()
    if dataset.name not in library.factory.DATASETS:
        near = get_close_matches(dataset.name, library.factory.DATASETS, n=3, cutoff=0.5)
        hint = f"is it {' or '.join(near)}?" if near else f"it has {', '.join(sorted(library.factory.DATASETS))}"
        raise UserError(f"reasoning-gym has no data set {dataset.name!r}; {hint}")
    try:
        return library.create_dataset(
            dataset.name, **{**json.loads(dataset.config), "size": dataset.size, "seed": dataset.seed}
        )
    except Exception as error:  # each data set checks its options in its own way
        raise UserError(
            f"reasoning-gym's {dataset.name} cannot be made with {dataset.config}: {one_line(error) or 'refused'}; "
            f"its options are {', '.join(sorted(options(dataset.name)))}"
        ) from error


def options(name: str) -> list[str]:
    """The options of one of the library's data sets, without size and seed."""
    _, config = load_library().factory.DATASETS[name]
    return [key for key in config.__dataclass_fields__ if key not in ("size", "seed")]


def load_library() -> Any:
    """The library, imported once. Raises UserError where it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"task reasoning_gym needs the library reasoning-gym ({one_line(error)}); "
            "pip install 'megasharp[reasoning-gym]'"
        ) from error
    return reasoning_gym


def load_items(path: Path) -> list[TaskItem]:
    """Problems that reasoning-gym generates. Raises UserError as `read_records` does."""
    return [
        TaskItem(
            record.id,
            "reasoning_gym",
            TEMPLATES["tags_chatml"].text_of(record.question),
            record.answer,
            path.name,
            question=record.question,
        )
        for record in read_records(path)
    ]
