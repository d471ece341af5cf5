"""Problems that reasoning-gym generates (2505.24760): a YAML file names data sets, their sizes, seeds and options.

    datasets:
      - {name: chain_sum, size: 2000, seed: 1, config: {max_terms: 4}}
      - {name: knights_knaves, size: 1000, seed: 1}

Problems are generated anew at every start: the same file gives the same problems with the same version of the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, JsonValue

from megasharp.config.core import Section, read_tree, validate
from megasharp.errors import UserError, one_line
from megasharp.rewards.reasoning_gym import GymAnswer, GymDataset, generated, problem


class GymEntry(Section):
    """One data set, and how much of it; `config` are its own options."""

    name: str
    size: int = Field(default=500, ge=1)
    seed: int = Field(default=1, ge=0)
    config: dict[str, JsonValue] = {}


class GymFile(Section):
    """The file."""

    datasets: list[GymEntry] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class GymRecord:
    """One generated problem. The id is the data set's name, seed and the problem's number."""

    id: str
    question: str
    answer: GymAnswer


def prompt_text(question: str) -> str:
    """A question as a ChatML prompt that asks for answer tags."""
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{question}\n"
        "Think step by step, then give your final answer alone between <answer> and </answer>.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


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
    file = validate(GymFile, read_tree(path), str(path))
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
