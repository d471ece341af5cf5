"""Grids, lists and tables that a response writes as Python or JSON would, read without ever running them.

SynLogic's own checkers hand such text to `eval`. The grammar here is small and has bounds: lists and tuples,
tables of keys and values, numbers, quoted strings, bare words, and comments from `#` to the end of a line.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 20_000
MAX_DEPTH = 8

Literal = int | float | str | list["Literal"] | dict[str, "Literal"]

_TOKEN = re.compile(
    r"""\s*+(?:\#[^\n]*+\s*+)*+(?:
        (?P<sign>[\[\](){},:])
      | "(?P<double>(?:[^"\\\n]|\\.)*)"
      | '(?P<single>(?:[^'\\\n]|\\.)*)'
      | (?P<float>-?[0-9]{1,18}\.[0-9]{1,18})(?![\w.])
      | (?P<int>-?[0-9]{1,18})(?![\w.])
      | (?P<word>[^\s\[\](){},:"'\#]+)
    )""",
    re.VERBOSE,
)
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class UnreadableError(ValueError):
    """The text is none of the grammar, or beyond its bounds."""


def read_literal(text: str) -> Literal:
    """The one value that `text` holds. Tuples become lists, keys become texts.

    Raises UnreadableError.

    Example: `read_literal("[[1, 'X'], (2, 3)]  # done")` is `[[1, "X"], [2, 3]]`.
    """
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"longer than {MAX_CHARACTERS} characters")
    reader = _Reader(text)
    value = reader.value(0)
    if reader.rest():
        raise UnreadableError("more text after the value")
    return value


class _Reader:
    """Recursive descent, at most `MAX_DEPTH` deep."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return re.sub(r"#[^\n]*", "", self._text[self._at :]).strip()

    def _next(self) -> re.Match[str]:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise UnreadableError("the text ends too early or holds a sign that is not read")
        self._at = match.end()
        return match

    def _peek(self) -> str | None:
        match = _TOKEN.match(self._text, self._at)
        return match["sign"] if match else None

    def value(self, depth: int) -> Literal:
        token = self._next()
        if token["sign"] in _CLOSING:
            if depth == MAX_DEPTH:
                raise UnreadableError(f"nested deeper than {MAX_DEPTH}")
            if token["sign"] == "{":
                return self._table(depth)
            closing, values = _CLOSING[token["sign"]], list[Literal]()
            while self._peek() != closing:
                values.append(self.value(depth + 1))
                self._comma(closing)
            self._next()
            return values
        if token["sign"]:
            raise UnreadableError(f"unexpected {token['sign']!r}")
        if token["int"]:
            return int(token["int"])
        if token["float"]:
            return float(token["float"])
        quoted = token["double"] if token["double"] is not None else token["single"]
        return re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else token["word"]

    def _table(self, depth: int) -> dict[str, Literal]:
        table: dict[str, Literal] = {}
        while self._peek() != "}":
            key = self.value(depth + 1)
            if not isinstance(key, str | int) or self._next()["sign"] != ":":
                raise UnreadableError("a table needs keys and values")
            table[str(key)] = self.value(depth + 1)
            self._comma("}")
        self._next()
        return table

    def _comma(self, closing: str) -> None:
        if self._peek() == ",":
            self._next()
        elif self._peek() != closing:
            raise UnreadableError("a comma is missing")


def whole_numbers(value: object) -> list[list[int]]:
    """A grid of whole numbers, digits in quotes and `2.0` included. Raises UnreadableError for anything else."""
    rows = value if isinstance(value, list) else []
    exact = [
        [int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in row]
        if isinstance(row, list)
        else row
        for row in rows
    ]
    return [[_whole(cell) for cell in row] for row in cells(exact)]


def words(value: object) -> list[list[str]]:
    """A grid whose cells are texts; numbers become their digits. Raises UnreadableError for anything else."""
    return [[str(cell) for cell in row] for row in cells(value)]


def cells(value: object) -> list[list[int | str]]:
    """A non-empty list of rows of numbers and texts. Raises UnreadableError for anything else."""
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) for row in rows):
        raise UnreadableError("not a list of rows")
    if not all(isinstance(cell, int | str) and not isinstance(cell, bool) for row in rows for cell in row):
        raise UnreadableError("a cell is neither a whole number nor a text")
    return rows


def _whole(cell: int | str) -> int:
    if isinstance(cell, int):
        return cell
    if not cell.isascii() or not cell.isdigit() or len(cell) > 18:
        raise UnreadableError(f"{cell[:20]!r} is no whole number")
    return int(cell)
