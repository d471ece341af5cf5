"""Multiple choice: ARC-Challenge and MMLU-Pro, each in its own fields, with the boxed prompt and one verifier.

Schema of allenai/ai2_arc (ARC-Challenge; read from the cards of its copies): `id`, `question`, `choices` of two lists
`text` and `label` (letters, or 1 to 4), `answerKey`. Schema of TIGER-Lab/MMLU-Pro (its card): `question_id`,
`question`, `options`, `answer` (A to J), `answer_index`, `cot_content`, `category`, `src`; an option "N/A" stands for
none, as in its own evaluation. How 2510.04028 writes options is not printed; they are written as MMLU-Pro does.

The verifier takes the label in the response's last box or after its last "answer is", as `labels.py` says. 2510.04028
asks for a box for ARC-c and MMLU-Pro alike (appendix C.2). MMLU-Pro's own prompts end in "the answer is (X)", and its
evaluation (evaluate_from_local.py) reads that, then "Answer: X", then any last capital letter, a guess that is not made
here. Labels are the problem's: letters, or numbers as in some of ARC's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import (
    Fields,
    absent,
    check_names,
    name_of,
    read_objects,
    short,
    text_field,
    texts_field,
)
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.labels import chosen_label
from megasharp.tasks.prompts import boxed_prompt
from megasharp.tasks.retraction import TAKEN_BACK, withdrawn

_NO_OPTION = "N/A"


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """One line of a data file.

    Example: `{"id": "a", "question": "Which is a metal?", "choices": {"text": ["iron", "salt"], "label": ["A", "B"]},
    "answerKey": "A"}`.
    """

    id: str
    question: str
    options: tuple[str, ...]
    answer: ChoiceAnswer

    @property
    def text(self) -> str:
        """The question with its options, one a line."""
        return _with_options(self.question, self.options, self.answer.labels)


def _with_options(question: str, options: tuple[str, ...], labels: tuple[str, ...]) -> str:
    lines = [f"{label}. {option}" for label, option in zip(labels, options, strict=True)]
    return "\n".join([question, "Options:", *lines])


def read_records(path: Path) -> list[ChoiceRecord]:
    """Read a JSONL file of problems of either kind. Raises UserError, naming file and line, for a bad one."""
    objects = read_objects(path, "write lines as of ARC or of MMLU-Pro")
    records = [
        read_mmlu_pro(fields, path, where) if "options" in fields else read_arc(fields, path, where)
        for where, fields in objects
    ]
    check_names([record.id for record in records], path)
    return records


def read_arc(fields: Fields, path: Path, where: str) -> ChoiceRecord:
    """A row of ARC; without an id it is named after `path`. Raises UserError naming `where`."""
    choices = fields.get("choices")
    if not isinstance(choices, dict):
        raise UserError(
            f"{where}: 'choices' must be an object with the lists 'text' and 'label' (ARC), or give 'options'"
            f"{absent(fields, 'choices')}"
        )
    options, labels = _labelled(choices, where)
    return _record(fields, name_of(fields, ("id",), path, where), options, labels, ("answerKey", where))


def read_mmlu_pro(fields: Fields, path: Path, where: str) -> ChoiceRecord:
    """A row of MMLU-Pro; without an id it is named after `path`. Raises UserError naming `where`."""
    options, labels = _lettered(fields, "options", where)
    return _record(fields, name_of(fields, ("question_id", "id"), path, where), options, labels, ("answer", where))


def _labelled(choices: Fields, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    options, labels = texts_field(choices, "text", where), texts_field(choices, "label", where)
    if len(options) != len(labels) or len(set(labels)) < len(labels):
        raise UserError(f"{where}: 'label' must name each option of 'text' once")
    return options, labels


def _lettered(fields: Fields, key: str, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    options = tuple(option for option in texts_field(fields, key, where) if option != _NO_OPTION)
    if len(options) > len(ascii_uppercase):
        raise UserError(f"{where}: '{key}' has more than {len(ascii_uppercase)} options, one for each letter")
    return options, tuple(ascii_uppercase[: len(options)])


def _own_options(fields: Fields, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of a user's own row and their labels, from its column `choices` or `options`."""
    key = "choices" if "choices" in fields else "options"
    if key not in fields:
        raise UserError(
            f"{where}: task choice needs a column choices, a list of texts (or an object with the lists text and "
            f"label){absent(fields, key)}"
        )
    found = fields[key]
    return _labelled(found, where) if isinstance(found, dict) else _lettered(fields, key, where)


def own_problem(question: str, fields: Fields, where: str) -> str:
    """A user's own question with the options of its row. Raises UserError naming `where`."""
    return _with_options(question, *_own_options(fields, where))


def own_answer(item: TaskItem, key: str) -> ChoiceAnswer:
    """The answer of a user's own row: a label, an option's text, or its number from 0, as MMLU has it.

    A text that may be several of these is the first one. Raises UserError where it is none.
    """
    where, value = f"row {item.id}", item.answer.given
    options, labels = _own_options(item.row or {}, where)
    text = str(value).strip()
    if isinstance(value, str):
        if text.upper() in labels:
            return ChoiceAnswer(text.upper(), labels, options)
        if value in options:
            return ChoiceAnswer(labels[options.index(value)], labels, options)
    if text.isdecimal() and int(text) < len(labels) and not isinstance(value, bool):
        return ChoiceAnswer(labels[int(text)], labels, options)
    raise UserError(
        f"{where}: '{key}' must be one of the labels {', '.join(labels)}, the text of an option, or its number from 0, "
        f"got {short(value)}"
    )


def _record(
    fields: Fields, name: str, options: tuple[str, ...], labels: tuple[str, ...], answer: tuple[str, str]
) -> ChoiceRecord:
    key, where = answer
    number = fields.get(key)
    counted = isinstance(number, int) and not isinstance(number, bool)
    if counted and str(number) not in labels:
        raise UserError(
            f"{where}: '{key}' must be one of the labels {', '.join(labels)}, got {number}, which may count from 0 or "
            "from 1; write the label as text"
        )
    label = str(number) if counted else text_field(fields, key, where)
    if label not in labels:
        raise UserError(f"{where}: '{key}' must be one of the labels {', '.join(labels)}, got {label!r}")
    return ChoiceRecord(name, text_field(fields, "question", where), options, ChoiceAnswer(label, labels, options))


@dataclass(frozen=True, slots=True)
class ChoiceAnswer(TaskAnswer):
    """The right label, all labels of the problem, and the texts of their options where they are known.

    Texts are no part of digests, which have the prompt.

    Example: `ChoiceAnswer("B", ("A", "B", "C", "D"))`.
    """

    label: str
    labels: tuple[str, ...]
    texts: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def options(self) -> dict[str, str]:
        """The text of each label; empty ones where they are not known."""
        return dict(zip(self.labels, self.texts or ("",) * len(self.labels), strict=True))


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""Judge the label that a response chooses. The canonical answer is the label. Rewards are 1.0 or 0.0.

    FORMAT: none of the problem's labels is chosen, or several are (`labels.py`). Wrong without a canonical answer:
    one taken back.

    Example: `verify(r"... \boxed{\text{(B)}}", ChoiceAnswer("B", ("A", "B", "C", "D")))` is
    `Verdict(Outcome.CORRECT, 1.0, "B", "")`.
    """
    assert isinstance(answer, ChoiceAnswer)
    chosen = chosen_label(text, answer.options)
    if chosen is None and withdrawn(text):
        return Verdict(Outcome.WRONG, 0.0, None, TAKEN_BACK)
    if chosen is None:
        return Verdict(Outcome.FORMAT, 0.0, None, f"none of the labels {', '.join(answer.labels)} is chosen")
    right = chosen == answer.label
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), chosen)


def load_items(path: Path) -> list[TaskItem]:
    """Multiple choice from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "choice", boxed_prompt(record.text), record.answer, path.name, question=record.text)
        for record in read_records(path)
    ]
