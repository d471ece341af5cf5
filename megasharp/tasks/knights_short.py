"""The puzzles of `knights` as text of a few characters, for models that know no words.

A person is a digit, a statement is written before its parts: `+2` "2 is a knight", `-2` a knave, `=02` the same, `#02`
of different kinds, `!s` not s, `&st` and, `|st` or, `>st` if s then t, `~st` if and only if.

A response is one sign a person, `1` a knight, `0` a knave. The puzzles are those of `knights`, so each has one
solution; only how they are asked and answered is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.knights import KnightsPuzzle, read_records

# Together with the digits: all characters of prompts and responses.
SIGNS = {
    "knight": "+",
    "knave": "-",
    "same": "=",
    "different": "#",
    "not": "!",
    "and": "&",
    "or": "|",
    "if": ">",
    "iff": "~",
}


def prompt_text(puzzle: KnightsPuzzle) -> str:
    """Everyone's statement, with commas between them, then a colon. Example: `-1,=01:` of two people."""
    return ",".join(map(_short, puzzle.statements)) + ":"


def _short(part: object) -> str:
    if isinstance(part, int):
        return str(part)
    assert isinstance(part, tuple)
    kind, *parts = part
    return SIGNS[str(kind)] + "".join(map(_short, parts))


@dataclass(frozen=True, slots=True)
class KnightsShortAnswer(TaskAnswer):
    """The solution: for each place, if it is a knight's. Example: `KnightsShortAnswer((True, False))`."""

    knights: tuple[bool, ...]


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge a whole response. Rewards are 1.0 or 0.0, the canonical answer is the signs.

    FORMAT: anything but as many signs `0` and `1` as there are people; white space around them does not count.

    Example: `verify("10", KnightsShortAnswer((True, False)))` is `Verdict(Outcome.CORRECT, 1.0, "10", "")`.
    """
    assert isinstance(answer, KnightsShortAnswer)
    said = text.strip()
    if len(said) != len(answer.knights) or not set(said) <= {"0", "1"}:
        return Verdict(Outcome.FORMAT, 0.0, None, f"not {len(answer.knights)} signs 0 or 1")
    right = said == signs(answer.knights)
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), said)


def signs(knights: tuple[bool, ...]) -> str:
    """A solution as a response gives it. Example: `signs((True, False))` is `10`."""
    return "".join("1" if knight else "0" for knight in knights)


def load_items(path: Path) -> list[TaskItem]:
    """The same files, asked and answered in a few characters."""
    return [
        TaskItem(
            record.id,
            "knights_short",
            prompt_text(record.puzzle),
            KnightsShortAnswer(record.puzzle.solution),
            path.name,
        )
        for record in read_records(path)
    ]
