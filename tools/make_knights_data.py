"""Write Knights-and-Knaves puzzles: train, dev and test, with no puzzle in two of them.

Deterministic in `--seed`. Two puzzles are the same if the same places say the same, whatever the names are.

    python tools/make_knights_data.py --out data/knights --people 2 3 4 --seed 1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from megasharp.tasks.knights import KnightsPuzzle, Statement, make_puzzle

SPLITS = {"dev": 128, "test": 256, "train": 8_000}


def draw(rng: Random, size: int, people: list[int], taken: set[tuple[Statement, ...]]) -> list[KnightsPuzzle]:
    """Draw `size` puzzles that are not in `taken`, of each number of people in turn, and add them to it.

    Raises ValueError where there are too few different ones.
    """
    puzzles: list[KnightsPuzzle] = []
    for tries in range(100 * size):
        puzzle = make_puzzle(rng, people[tries % len(people)])
        if puzzle.statements not in taken:
            taken.add(puzzle.statements)
            puzzles.append(puzzle)
        if len(puzzles) == size:
            return puzzles
    raise ValueError(f"too few different puzzles of {people} people; add a larger number to --people")


def lines(split: str, puzzles: list[KnightsPuzzle]) -> str:
    """The data file's text, ids numbered in order."""
    return "".join(
        json.dumps(
            {
                "id": f"knights-{split}-{index:05d}",
                "names": puzzle.names,
                "statements": puzzle.statements,
                "solution": puzzle.solution,
            },
            separators=(",", ":"),
        )
        + "\n"
        for index, puzzle in enumerate(puzzles)
    )


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--people", type=int, nargs="+", default=[2, 3, 4, 5], help="2 to 8, several in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=SPLITS["train"], help="puzzles of the train file")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = Random(arguments.seed)
    taken: set[tuple[Statement, ...]] = set()
    for split, size in {**SPLITS, "train": arguments.train}.items():
        path = arguments.out / f"{split}.jsonl"
        path.write_text(lines(split, draw(rng, size, arguments.people, taken)), encoding="utf-8")
        print(f"{path}: {size} puzzles")


if __name__ == "__main__":
    main()
