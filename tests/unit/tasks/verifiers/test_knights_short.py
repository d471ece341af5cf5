"""Knights and Knaves in a few characters: the answer's signs, and the puzzle's text read back by hand."""

from __future__ import annotations

from random import Random

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.knights import KnightsPuzzle, make_puzzle, solutions
from megasharp.tasks.knights_short import SIGNS, KnightsShortAnswer, prompt_text, signs, verify


@each_case(
    ("text", "outcome"),
    [
        ("101", Outcome.CORRECT),
        (" 101 ", Outcome.CORRECT),
        ("010", Outcome.WRONG),
        ("111", Outcome.WRONG),
        ("10", Outcome.FORMAT),
        ("1011", Outcome.FORMAT),
        ("1 01", Outcome.FORMAT),
        ("1x1", Outcome.FORMAT),
        ("", Outcome.FORMAT),
        ("1" * 1_000_000, Outcome.FORMAT),
    ],
    ids=range(10),
)
def test_verdicts(text: str, outcome: Outcome) -> None:
    verdict = verify(text, KnightsShortAnswer((True, False, True)))
    assert (verdict.outcome, verdict.reward) == (outcome, float(outcome is Outcome.CORRECT))
    assert bool(verdict.canonical_answer) == (outcome is not Outcome.FORMAT)


def test_a_puzzle_by_hand() -> None:
    said = (("if", ("knave", 1), ("not", ("knight", 2))), ("same", 0, 1), ("different", 1, 2))
    puzzle = KnightsPuzzle(("Alice", "Boris", "Clara"), said, (True, True, False))
    assert prompt_text(puzzle) == ">-1!+2,=01,#12:"
    assert signs(puzzle.solution) == "110"


def read_back(text: str) -> tuple:
    """A statement in signs as a nested one, by reading from the right."""
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    stack: list[object] = []
    for sign in reversed(text):
        if sign.isdigit():
            stack.append(int(sign))
        else:
            parts = {"+": 1, "-": 1, "!": 1}.get(sign, 2)
            stack.append((kinds[sign], *(stack.pop() for _ in range(parts))))
    (statement,) = stack
    assert isinstance(statement, tuple)
    return statement


def test_the_text_says_the_whole_puzzle() -> None:
    rng = Random(3)
    for people in (2, 3, 5, 8):
        for _ in range(20):
            puzzle = make_puzzle(rng, people, depth=3)
            text = prompt_text(puzzle)
            statements = tuple(read_back(each) for each in text.removesuffix(":").split(","))
            assert statements == puzzle.statements
            assert solutions(statements) == [puzzle.solution]
