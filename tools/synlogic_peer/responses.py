"""Responses to a puzzle: right ones in several spellings, wrong ones, and malformed ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from synlogic_peer.forms import FORMS
from synlogic_peer.games import Puzzle
from synlogic_peer.malformed import MALFORMED
from synlogic_peer.near_misses import near_misses

RIGHT, WRONG, OFF_FORM = "right", "wrong", "malformed"
KINDS = (RIGHT, WRONG, OFF_FORM)

_BRACKETS = "We start with row (1) and column [2], where {3} of 4 cells are known, and try `5` first."
SPELLINGS: dict[str, Callable[[str], str]] = {
    "alone": lambda answer: answer,
    "after prose": lambda answer: f"Let us go step by step.\n\nAll of the conditions hold now.\n\n{answer}",
    "after brackets": lambda answer: f"{_BRACKETS}\n\n{answer}",
    "in tags": lambda answer: f"<think>We try some.</think>\n<answer>{answer}</answer>",
    "spaced": lambda answer: f"\n\n  {answer}  \n\n",
}


@dataclass(frozen=True, slots=True)
class Response:
    """A response, its kind and what was done to it. A wrong one may turn out to be another solution."""

    puzzle: Puzzle
    kind: str
    change: str
    text: str


def responses(puzzles: list[Puzzle], count: int, rng: random.Random) -> list[Response]:
    """At least `count` responses of each kind; of the malformed ones every change."""
    right = [_right(puzzles, turn) for turn in range(count)]
    return [
        *right,
        *_wrong(puzzles, count, rng),
        *(_malformed(puzzles, turn, rng) for turn in range(max(count, len(MALFORMED)))),
    ]


def _right(puzzles: list[Puzzle], turn: int) -> Response:
    """Puzzles, spellings and solutions in turn."""
    puzzle = puzzles[turn % len(puzzles)]
    at = turn // len(puzzles)
    name = list(SPELLINGS)[at % len(SPELLINGS)]
    solution = puzzle.solutions[at % len(puzzle.solutions)]
    second = ", second solution" if at % len(puzzle.solutions) else ""
    return Response(puzzle, RIGHT, name + second, SPELLINGS[name](FORMS[puzzle.task].write(solution)))


def _wrong(puzzles: list[Puzzle], count: int, rng: random.Random) -> list[Response]:
    """Puzzles in turn, as long as they have changes left."""
    misses = [iter(near_misses(puzzle.solutions[0], count, rng)) for puzzle in puzzles]
    made = [
        Response(puzzle, WRONG, miss[0], FORMS[puzzle.task].write(miss[1]))
        for turn in zip_longest(*misses)
        for puzzle, miss in zip(puzzles, turn, strict=True)
        if miss is not None
    ]
    return made[:count]


def _malformed(puzzles: list[Puzzle], turn: int, rng: random.Random) -> Response:
    """Changes in turn, each of another puzzle."""
    puzzle = puzzles[turn % len(puzzles)]
    name = list(MALFORMED)[turn % len(MALFORMED)]
    misses = near_misses(puzzle.solutions[0], 1, rng)
    wrong = misses[0][1] if misses else puzzle.solutions[0]
    return Response(puzzle, OFF_FORM, name, MALFORMED[name](FORMS[puzzle.task], puzzle.solutions[0], wrong))
