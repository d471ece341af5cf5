"""BIG-Bench Hard (2210.09261): 27 tasks, 6,511 questions with short answers.

lukaemon/bbh has a configuration for each task, split test, with `input` and `target`; the authors' own repository
(suzgunmirac/BIG-Bench-Hard, bbh/<task>.json) has the same objects in a list called `examples`, and a folder of those
files is read too. 2510.14807 does not print its prompt; here a box is asked for.
"""

from __future__ import annotations

from megasharp.tasks.data_fields import Fields, text_field
from megasharp.tasks.sets.data_set import DataSet, Part, Problem, Source
from megasharp.tasks.short_answer import answer_to

TASKS = (
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
)


def read(fields: Fields, where: str) -> Problem:
    """A row of any task."""
    question = text_field(fields, "input", where)
    return Problem(question, answer_to(question, text_field(fields, "target", where)))


BBH = DataSet(
    name="bbh",
    task="short_answer",
    about="BIG-Bench Hard, all 27 tasks",
    parts=tuple(Part(Source(task, "lukaemon/bbh", "test", config=task), read) for task in TASKS),
    prompt="boxed_chatml",
    licence="MIT (the authors' repository)",
    known="code",
    used_by="2510.14807",
    expected=6511,
)
