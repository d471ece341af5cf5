"""The record of a data set: its tables on the hub, the readers of their rows, and its known properties.

A row is read by a function of (fields, place) that gives a `Problem`, or a `LeftOut` with the reason why the set does
not have the row (another level, no answer). A field that is missing or of another type is a UserError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megasharp.common.records import TaskAnswer
from megasharp.tasks.data_fields import Fields

# The source of a schema: the public card, public copies of rows, public code that reads the set, or none of them.
Known = Literal["card", "rows", "code", "unverified"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A row's question, before any prompt, and its answer; without an id it gets the row's number.

    Messages `before` the question, role and text, are asked with it.

    Example: `Problem("What is 1+1?", MathAnswer("2"))`.
    """

    question: str
    answer: TaskAnswer
    id: str = ""
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is no problem of the set, and why. Example: `LeftOut("another level")`."""

    reason: str


Read = Callable[[Fields, str], Problem | LeftOut]


@dataclass(frozen=True, slots=True)
class Source:
    """A table of the hub. `name` is the name of a local copy of it, a file or a folder.

    `files` are read one by one where the repository holds data files that the library's loader cannot read; `rows`
    cuts a range of row numbers, from 0, out of the table.
    Example: `Source("gsm8k", "openai/gsm8k", "train", config="main")`.
    """

    name: str
    hub: str
    split: str
    config: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One table of a set and the function that reads its rows."""

    source: Source
    read: Read


@dataclass(frozen=True, slots=True)
class DataSet:
    """A named set of problems of one task.

    `prompt` names its template. `expected` problems are there on the hub, give or take the share `tolerance`. Of a set
    that `repeats`, only the first row of each question counts. A set without a hub is for local files alone.
    """

    name: str
    task: str
    about: str
    parts: tuple[Part, ...]
    prompt: str
    licence: str
    known: Known
    used_by: str = ""
    expected: int | None = None
    tolerance: float = 0.0
    repeats: bool = False

    @property
    def hub(self) -> str:
        """Hub repositories that hold this data set, in order of preference."""
        return " + ".join(dict.fromkeys(part.source.hub for part in self.parts if part.source.hub))
