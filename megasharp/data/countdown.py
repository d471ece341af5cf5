"""Countdown problems: a seeded generator of solvable ones, their prompt text, and their data files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

from megasharp.errors import UserError
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
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read this data file ({error}); check data.path") from error
    records = [_record(line, f"{path}:{row}") for row, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise UserError(f"{path}: no problems in this data file; make one with tools/make_countdown_data.py")
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise UserError(f"{path}: the id {record.id!r} appears twice; give each problem its own")
        seen.add(record.id)
    return records


def _record(line: bytes, where: str) -> CountdownRecord:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason} at its byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: not a JSON object; write one object per line")
    identity = fields.get("id")
    # JSON can hold halves of surrogate pairs, which no table or file name can.
    if not isinstance(identity, str) or not identity or any("\ud800" <= sign <= "\udfff" for sign in identity):
        raise UserError(f"{where}: 'id' must be a non-empty string of Unicode text")
    solutions = None if fields.get("solutions") is None else _positive(fields, "solutions", where)
    return CountdownRecord(identity, _numbers(fields, where), _positive(fields, "target", where), solutions)


def _numbers(fields: Mapping[str, object], where: str) -> tuple[int, ...]:
    numbers = fields.get("numbers")
    if not isinstance(numbers, list) or len(numbers) < 2 or not all(_is_positive(each) for each in numbers):
        raise UserError(f"{where}: 'numbers' must be two or more positive integers, got {numbers!r}")
    return tuple(numbers)


def _positive(fields: Mapping[str, object], key: str, where: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or not _is_positive(value):
        raise UserError(f"{where}: '{key}' must be a positive integer, got {value!r}")
    return value


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
