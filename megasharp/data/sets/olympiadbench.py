"""OlympiadBench (2402.14008), the part that others evaluate on: English, mathematics, text only, open-ended.

Hothan/OlympiadBench, configuration OE_TO_maths_en_COMP, split train, 674 problems: `id`, `question`, `context` or null,
`final_answer` (a list of one text), `unit` or null, `error` or null, and others. Rows are in public code
(simpleRL-reason, data/olympiadbench, 675 of them). One problem has an `error`, by which an answer may be off; it is not
applied.
"""

from __future__ import annotations

from megasharp.data.lines import Fields, number_field, optional_text, text_field, texts_field
from megasharp.data.sets.base import DataSet, Part, Problem, Source
from megasharp.rewards.math import MathAnswer


def read(fields: Fields, where: str) -> Problem:
    """The context, where there is one, comes before the question, on a line of its own."""
    context = optional_text(fields, "context", where)
    question = text_field(fields, "question", where)
    answer = ", ".join(texts_field(fields, "final_answer", where))
    text = f"{context}\n{question}" if context else question
    return Problem(text, MathAnswer(answer), number_field(fields, "id", where))


OLYMPIADBENCH = DataSet(
    name="olympiadbench",
    task="math",
    about="OlympiadBench, English text-only mathematics",
    parts=(Part(Source("olympiadbench", "Hothan/OlympiadBench", "train", config="OE_TO_maths_en_COMP"), read),),
    prompt="boxed_chatml",
    licence="Apache-2.0 (not read)",
    known="rows",
    used_by="2510.14807, 2601.15609, 2511.19942",
    expected=674,
    tolerance=0.002,
)
