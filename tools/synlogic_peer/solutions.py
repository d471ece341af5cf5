"""Second solutions of puzzles that have several, found by trying: none of the checkers that are compared takes part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, permutations, product

Numbers = Sequence[int]


def expressions(numbers: Numbers, operators: Sequence[str], result: int) -> Iterator[str]:
    """Expressions of all the numbers, in parentheses throughout, that are worth the result."""
    yield from _joined([(Fraction(number), str(number)) for number in numbers], operators, result)


def _joined(terms: list[tuple[Fraction, str]], operators: Sequence[str], result: int) -> Iterator[str]:
    if len(terms) == 1 and terms[0][0] == result:
        yield terms[0][1]
    for one, other in permutations(range(len(terms)), 2):
        rest = [term for at, term in enumerate(terms) if at not in (one, other)]
        (a, left), (b, right) = terms[one], terms[other]
        for sign in operators:
            if sign in "+*" and one > other:
                continue
            if sign in "+-*" or (sign == "/" and b):
                value = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b
                yield from _joined([*rest, (value, f"({left}{sign}{right})")], operators, result)


def digits(query: str, tries: int = 2_000) -> Iterator[str]:
    """Equations with a digit for each `?` that hold; numbers have no leading zeros."""
    blanks = query.count("?")
    for some in islice(product("123456789", repeat=blanks), tries):
        text = query.replace("?", "{}").format(*some)
        left, _, right = text.partition("=")
        if value_of(left) == value_of(right) is not None:
            yield text


def value_of(text: str) -> Fraction | None:
    """The value of digits, signs and parentheses, none where something is divided by zero."""
    if not re.fullmatch(r"[0-9+*/%() -]+", text):
        return None
    try:
        return Fraction(eval(re.sub(r"[0-9]+", r"F(\g<0>)", text), {"F": Fraction, "__builtins__": {}}))
    except (ZeroDivisionError, SyntaxError):
        return None


def kukurasu(rows: Numbers, columns: Numbers) -> Iterator[list[list[str]]]:
    """Grids of `1` and `X` with these sums."""
    lines = [
        [
            line
            for line in product((0, 1), repeat=len(columns))
            if sum(at for at, one in enumerate(line, 1) if one) == row
        ]
        for row in rows
    ]
    for grid in product(*lines):
        if [sum(at for at, line in enumerate(grid, 1) if line[column]) for column in range(len(columns))] == list(
            columns
        ):
            yield [["1" if one else "X" for one in line] for line in grid]


def latin(size: int) -> Iterator[list[list[int]]]:
    """All Latin squares of a size, row by row."""

    def below(grid: list[tuple[int, ...]]) -> Iterator[list[list[int]]]:
        if len(grid) == size:
            yield [list(row) for row in grid]
            return
        for row in permutations(range(1, size + 1)):
            if all(row[column] != above[column] for above in grid for column in range(size)):
                yield from below([*grid, row])

    yield from below([])
