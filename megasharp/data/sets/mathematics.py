r"""Rows that are a question and its answer: readers that several sets of mathematics share."""

from __future__ import annotations

import re

from megasharp.data.lines import Fields, absent, number_field, object_field, text_field
from megasharp.data.sets.base import LeftOut, Problem, Read
from megasharp.errors import UserError
from megasharp.rewards.extraction import last_box
from megasharp.rewards.math import MathAnswer

NO_BOX = LeftOut("its solution has no boxed answer")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,{}\\]+)")
_LEVEL = re.compile(r"(?:Level )?([1-5?])")


def answered(question: str, answer: str, identity: str = "") -> Read:
    """A reader of rows with these two fields, the answer text or a number, and one that names the row."""

    def read(fields: Fields, where: str) -> Problem:
        name = number_field(fields, identity, where) if identity else ""
        return Problem(text_field(fields, question, where), MathAnswer(number_field(fields, answer, where)), name)

    return read


def boxed_solution(levels: str = "12345?") -> Read:
    r"""A reader of MATH's rows (`problem`, `level`, `solution`): the answer is the solution's last box.

    Rows of other levels are left out; "?" is the level of the few that have none.
    """

    def read(fields: Fields, where: str) -> Problem | LeftOut:
        problem, solution = text_field(fields, "problem", where), text_field(fields, "solution", where)
        if level_of(fields, where) not in levels:
            return LeftOut("another level")
        answer = last_box(solution) or _bare_box(solution)
        return Problem(problem, MathAnswer(answer)) if answer else NO_BOX

    return read


def _bare_box(solution: str) -> str:
    r"""The answer of a box without braces, `\boxed 2`, which two solutions of MATH have; empty where there is none."""
    found = _BARE_BOX.findall(solution)
    return found[-1] if found else ""


def level_of(fields: Fields, where: str) -> str:
    """The level of a row of MATH, "1" to "5" or "?", written `Level 3` or 3. Raises UserError for another."""
    match = _LEVEL.fullmatch(str(fields.get("level")))
    if match is None:
        got = f"{fields.get('level')!r}{absent(fields, 'level')}"
        raise UserError(f"{where}: 'level' must be Level 1 to Level 5, got {got}")
    return match[1]


def message_of(fields: Fields, where: str) -> str:
    """The text of the last message in `prompt`, a list of {role, content}. Raises UserError where that is another."""
    messages = fields.get("prompt")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        raise UserError(f"{where}: 'prompt' must be a list of messages{absent(fields, 'prompt')}")
    return text_field(last, "content", f"{where}, prompt")


def verl(fields: Fields, where: str) -> Problem:
    """A row of verl's files: the last message of `prompt`, and `reward_model.ground_truth`, text or {target: text}."""
    model = object_field(fields, "reward_model", where)
    inside = f"{where}, reward_model"
    truth = model.get("ground_truth")
    if isinstance(truth, dict):
        answer = number_field(truth, "target", f"{inside}.ground_truth")
    else:
        answer = number_field(model, "ground_truth", inside)
    return Problem(message_of(fields, where), MathAnswer(answer))
