"""The form in which each task's prompt asks for an answer: how a Python value is spelled, and what stands around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Form:
    """`spell` writes a value, `frame` has `{}` in its place.

    Example: `Form(str, "\\\\boxed{{{}}}").write(7)` is `\\boxed{7}`.
    """

    spell: Callable[[Any], str]
    frame: str = "{}"

    def write(self, value: Any) -> str:
        """A response that is nothing but the answer."""
        return self.around(self.spell(value))

    def around(self, spelled: str) -> str:
        """The form around any text."""
        return self.frame.format(spelled)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rows(value: Any) -> str:
    """Numbers with spaces between them, rows with commas."""
    if not all(isinstance(row, list) for row in value):
        return " ".join(map(str, value))
    return ",".join(" ".join(map(str, row)) for row in value)


def _comma(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_BOX = "\\boxed{{{}}}"
_PYTHON = "```python\n{}\n```"
_BRACKETS = "[[{}]]"

FORMS: dict[str, Form] = {
    **dict.fromkeys(("arc_agi", "arc_agi_2", "zebra_puzzle"), Form(_json, "```json\n{}\n```")),
    **dict.fromkeys(("arrow_maze", "goods_exchange", "number_wall", "skyscraper_puzzle"), Form(repr, _PYTHON)),
    **dict.fromkeys(("star_placement_puzzle", "sudoku", "survo"), Form(repr, _PYTHON)),
    "mathador": Form(str, _PYTHON),
    "cipher": Form(lambda text: repr([[text]]), _PYTHON),
    **dict.fromkeys(("campsite", "kukurasu", "numbrix", "time_sequence", "wordscapes"), Form(_json)),
    **dict.fromkeys(("minesweeper", "norinori"), Form(repr)),
    **dict.fromkeys(("calcudoko", "futoshiki"), Form(_rows, _BRACKETS)),
    "math_path": Form(str, _BRACKETS),
    **dict.fromkeys(
        ("boolean_expressions", "space_reasoning", "space_reasoning_tree", "operation"), Form(_comma, _BOX)
    ),
    **dict.fromkeys(
        ("word_sorting", "word_sorting_mistake", "object_counting", "object_properties"), Form(_comma, _BOX)
    ),
    **dict.fromkeys(("buggy_tables", "dyck_language", "dyck_language_errors"), Form(str)),
    "dyck_language_reasoning_errors": Form(lambda value: ",".join(map(str, value))),
    "cryptarithm": Form(str, "The answer is {}."),
    "web_of_lies": Form(_comma, "The answer is: **{}**."),
}
