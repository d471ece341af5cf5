"""Countdown problems: a seeded generator of solvable ones, their prompt text, and their data files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

from megasharp.data.lines import (
    Fields,
    check_names,
    positive_field,
    positives_field,
    read_objects,
    text_field,
)
from megasharp.rewards.countdown import CountdownAnswer


@dataclass(frozen=True, slots=True)
class CountdownRange:
    """Which problems to make: numbers from 1 to `largest_number`, targets from 1 to `largest_target`."""

    largest_number: int = 9
    largest_target: int = 40


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """A problem and the solution it was made from.

    Example: `CountdownProblem((3, 5, 7, 8), 24, "((8-5)*7)+3")`.
    """

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two problems the same: the numbers in any order, and the target."""
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True, slots=True)
class CountdownRecord:
    """One line of a data file. `solutions` counts the distinct solutions; None where the file does not say.

    Example: `{"id": "countdown-4-00017", "numbers": [3, 5, 7, 8], "target": 24, "solutions": 9}`.
    """

    id: str
    numbers: tuple[int, ...]
    target: int
    solutions: int | None

    @property
    def answer(self) -> CountdownAnswer:
        """What the verifier needs."""
        return CountdownAnswer(self.numbers, self.target)


def prompt_text(numbers: Sequence[int], target: int) -> str:
    """The prompt of a problem, for instance `3 5 7 8=24:`; a response is an expression and the end token."""
    return f"{' '.join(map(str, numbers))}={target}:"


def make_problem(rng: Random, count: int, within: CountdownRange | None = None) -> CountdownProblem:
    """A random solvable problem of `count` numbers: a random expression whose value is a target in range."""
    within = within or CountdownRange()
    while True:
        numbers = tuple(rng.randint(1, within.largest_number) for _ in range(count))
        solution, value = _random_expression(rng, rng.sample(numbers, count))
        if value.denominator == 1 and 1 <= value <= within.largest_target:
            return CountdownProblem(numbers, int(value), solution)


def _random_expression(rng: Random, numbers: Sequence[int]) -> tuple[str, Fraction]:
    """A random expression over `numbers` in this order, inner operations in parentheses, and its value."""
    if len(numbers) == 1:
        return str(numbers[0]), Fraction(numbers[0])
    cut = rng.randint(1, len(numbers) - 1)
    left, left_value = _random_expression(rng, numbers[:cut])
    right, right_value = _random_expression(rng, numbers[cut:])
    exact = right_value != 0 and (left_value / right_value).denominator == 1
    operator = rng.choice("+-*/" if exact else "+-*")
    value = {
        "+": left_value + right_value,
        "-": left_value - right_value,
        "*": left_value * right_value,
        "/": left_value / right_value if exact else Fraction(0),
    }[operator]
    return f"{_inner(left)}{operator}{_inner(right)}", value


def _inner(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"


def read_records(path: Path) -> list[CountdownRecord]:
    """Read a JSONL file of problems: objects with `id`, `numbers`, `target` and optionally `solutions`.

    Raises UserError, naming the file and the line, for a missing or empty file, a bad line, a repeated id.
    """
    objects = read_objects(path, "make one with tools/make_countdown_data.py")
    records = [_record(fields, where) for where, fields in objects]
    check_names([record.id for record in records], path)
    return records


def _record(fields: Fields, where: str) -> CountdownRecord:
    solutions = None if fields.get("solutions") is None else positive_field(fields, "solutions", where)
    return CountdownRecord(
        text_field(fields, "id", where),
        positives_field(fields, "numbers", where),
        positive_field(fields, "target", where),
        solutions,
    )
