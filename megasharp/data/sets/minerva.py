r"""Minerva's undergraduate problems from MIT OpenCourseWare (2206.14858): 272.

math-ai/minervamath has `question` and `answer` by most public code that reads it, `problem` and `solution` by some; the
latter, with the answer in the solution's last box, is the source's own form (rows in simpleRL-reason,
data/minerva_math). Both are read.
"""

from __future__ import annotations

from megasharp.data.lines import Fields, text_field
from megasharp.data.sets.base import DataSet, LeftOut, Part, Problem, Source
from megasharp.data.sets.mathematics import NO_BOX, answered
from megasharp.rewards.extraction import last_box
from megasharp.rewards.math import MathAnswer

_ANSWERED = answered("question", "answer")


def read(fields: Fields, where: str) -> Problem | LeftOut:
    """A row of either form."""
    if "solution" not in fields:
        return _ANSWERED(fields, where)
    answer = last_box(text_field(fields, "solution", where))
    return Problem(text_field(fields, "problem", where), MathAnswer(answer)) if answer else NO_BOX


MINERVA = DataSet(
    name="minerva",
    task="math",
    about="Minerva's MIT OpenCourseWare problems",
    parts=(Part(Source("minerva", "math-ai/minervamath", "test"), read),),
    prompt="boxed_chatml",
    licence="none read; the courses are CC BY-NC-SA",
    known="rows",
    used_by="2510.14807, 2601.15609",
    expected=272,
)
