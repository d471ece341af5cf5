"""Write the quickstart's Countdown problems: train, dev and test, with no problem in two of them.

Deterministic in `--seed`. Two problems are the same if they have the same numbers, in any order, and the
same target. Dev and test hold four-number problems only (what the quickstart reports); a tenth of train has
three numbers.

    python tools/make_countdown_data.py --out examples/quickstart/data --seed 1
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from megasharp.data.countdown import CountdownProblem, make_problem
from megasharp.rewards.countdown_solver import count_solutions

SPLITS = {"dev": 128, "test": 256, "train": 8_000}
THREE_NUMBER_SHARE = {"dev": 0.0, "test": 0.0, "train": 0.1}

Key = tuple[tuple[int, ...], int]


def draw(rng: Random, size: int, three_number_share: float, taken: set[Key]) -> list[CountdownProblem]:
    """Draw `size` problems that are not in `taken`, and add them to it."""
    problems: list[CountdownProblem] = []
    three_numbers = round(size * three_number_share)
    while len(problems) < size:
        problem = make_problem(rng, 3 if len(problems) < three_numbers else 4)
        if problem.key not in taken:
            taken.add(problem.key)
            problems.append(problem)
    rng.shuffle(problems)
    return problems


def lines(split: str, problems: Iterable[CountdownProblem]) -> Iterable[str]:
    """The data file's lines, ids numbered in order."""
    for index, problem in enumerate(problems):
        record = {
            "id": f"countdown-{split}-{index:05d}",
            "numbers": list(problem.numbers),
            "target": problem.target,
            "solutions": count_solutions(problem.numbers, problem.target),
        }
        yield json.dumps(record, separators=(",", ":")) + "\n"


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = Random(arguments.seed)
    taken: set[Key] = set()
    for split, size in SPLITS.items():
        problems = draw(rng, size, THREE_NUMBER_SHARE[split], taken)
        path = arguments.out / f"{split}.jsonl"
        path.write_text("".join(lines(split, problems)), encoding="utf-8")
        print(f"{path}: {size} problems")


if __name__ == "__main__":
    main()
