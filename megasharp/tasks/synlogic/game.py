"""A SynLogic game as its data set stores it, read once, and a checker's finding on a response to it.

The set keeps, for each problem, a JSON text with `question`, `answer` and the `metadata` that its task's checker needs.
A checker is made of it in one step, which is where a missing or odd field is found: when data are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megasharp.tasks.synlogic.literals import UnreadableError, whole_numbers, words

T = TypeVar("T")

Grid = list[list[str]]
Numbers = list[list[int]]
# A cell's row and column, and the steps to the cells beside it.
Place = tuple[int, int]
SIDES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class GameError(ValueError):
    """The stored game lacks what its task's checker needs; the text names the field."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A response's answer, in one spelling for equal answers, and the checker's decision on it."""

    given: str
    right: bool


# The response's final part in, a finding out. Raises UnreadableError where no answer can be read.
Check = Callable[[str], Finding]


@dataclass(frozen=True, slots=True)
class Game:
    """The stored game. `answer` is its reference answer as text, JSON where it is not a text."""

    question: str
    answer: str
    metadata: Mapping[str, object]

    def field(self, name: str) -> object:
        """A field of the metadata. Raises GameError where there is none."""
        if name not in self.metadata:
            raise GameError(f"metadata has no {name!r}")
        return self.metadata[name]

    def whole(self, name: str) -> int:
        """A field that is a whole number."""
        value = self.field(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise GameError(f"metadata's {name!r} must be a whole number")
        return value

    def text(self, name: str) -> str:
        """A field that is a text."""
        value = self.field(name)
        if not isinstance(value, str):
            raise GameError(f"metadata's {name!r} must be a text")
        return value

    def wholes(self, name: str) -> list[int]:
        """A field that is a list of whole numbers."""
        return self._read(name, lambda value: whole_numbers([value])[0], "a list of whole numbers")

    def texts(self, name: str) -> list[str]:
        """A field that is a list of texts."""
        return self._read(name, lambda value: words([value])[0], "a list of texts")

    def numbers(self, name: str) -> Numbers:
        """A field that is a grid of whole numbers."""
        return self._read(name, whole_numbers, "rows of whole numbers")

    def grid(self, name: str) -> Grid:
        """A field that is a grid; every cell as text."""
        return self._read(name, words, "rows of cells")

    def _read(self, name: str, read: Callable[[object], T], kind: str) -> T:
        try:
            return read(self.field(name))
        except UnreadableError as error:
            raise GameError(f"metadata's {name!r} must be {kind}") from error


def read_game(text: str) -> Game:
    """A game of its JSON text. Raises GameError."""
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GameError("not a JSON text") from error
    if not isinstance(stored, dict):
        raise GameError("not a JSON object")
    answer, metadata = stored.get("answer"), stored.get("metadata")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise GameError("'metadata' must be an object")
    question = stored.get("question")
    spelled = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return Game(question if isinstance(question, str) else "", spelled, metadata)


def shape(grid: list[list[int]] | Grid) -> list[int]:
    """The lengths of a grid's rows."""
    return [len(row) for row in grid]


def spelled(grid: list[list[int]] | Grid) -> str:
    """A grid in one line. Example: `spelled([[1, 2], [3, 4]])` is `1 2/3 4`."""
    return "/".join(" ".join(map(str, row)) for row in grid)
