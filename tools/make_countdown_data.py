"""Write the quickstart's Countdown problems: train, dev and test, with no problem in two of them.

Deterministic in `--seed`. Two problems are the same if they have the same numbers, in any order, and the
same target. Dev and test hold four-number problems only (what the quickstart reports); a tenth of train has
three numbers. `--numbers` makes all problems of so many instead: of three there are 1,712 or so. `--solutions` keeps
problems with so many distinct solutions alone.

    python tools/make_countdown_data.py --out examples/quickstart/data --seed 1
    python tools/make_countdown_data.py --out few --numbers 4 --solutions 2-3 --train 2000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from megasharp.tasks.countdown import CountdownProblem, count_solutions, make_problem

SPLITS = {"dev": 128, "test": 256, "train": 8_000}
THREE_NUMBER_SHARE = {"dev": 0.0, "test": 0.0, "train": 0.1}

Key = tuple[tuple[int, ...], int]


def draw(
    rng: Random, counts: list[int], taken: set[Key], solutions: tuple[int, int] | None = None
) -> list[CountdownProblem]:
    """Draw a problem of each of these many numbers that is not in `taken`, and add them to it.

    With `solutions` each has at least and at most that many of them.
    """
    problems: list[CountdownProblem] = []
    while len(problems) < len(counts):
        problem = make_problem(rng, counts[len(problems)])
        fits = solutions is None or solutions[0] <= count_solutions(problem.numbers, problem.target) <= solutions[1]
        if fits and problem.key not in taken:
            taken.add(problem.key)
            problems.append(problem)
    rng.shuffle(problems)
    return problems


def mixed(size: int, three_number_share: float) -> list[int]:
    """How many numbers each problem has: three first, then four."""
    three_numbers = round(size * three_number_share)
    return [3] * three_numbers + [4] * (size - three_numbers)


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


def solution_range(text: str) -> tuple[int, int]:
    """Read `3` as (3, 3) and `2-3` as (2, 3)."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--numbers", type=int, help="how many numbers every problem has, in all three files")
    parser.add_argument("--solutions", type=solution_range, help="N, or A-B, solutions that every problem has")
    parser.add_argument("--train", type=int, default=SPLITS["train"], help="problems of the train file")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = Random(arguments.seed)
    taken: set[Key] = set()
    for split, size in {**SPLITS, "train": arguments.train}.items():
        counts = [arguments.numbers] * size if arguments.numbers else mixed(size, THREE_NUMBER_SHARE[split])
        problems = draw(rng, counts, taken, arguments.solutions)
        path = arguments.out / f"{split}.jsonl"
        path.write_text("".join(lines(split, problems)), encoding="utf-8")
        print(f"{path}: {size} problems")


if __name__ == "__main__":
    main()
