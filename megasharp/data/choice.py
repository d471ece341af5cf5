"""Multiple choice: ARC-Challenge and MMLU-Pro, each in its own fields, with the boxed prompt.

Schema of allenai/ai2_arc (ARC-Challenge; read from the cards of its copies): `id`, `question`, `choices` of two lists
`text` and `label` (letters, or 1 to 4), `answerKey`. Schema of TIGER-Lab/MMLU-Pro (its card): `question_id`,
`question`, `options`, `answer` (A to J), `answer_index`, `cot_content`, `category`, `src`; an option "N/A" stands for
none, as in its own evaluation. How 2510.04028 writes options is not printed; they are written as MMLU-Pro does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from megasharp.data.lines import Fields, absent, check_names, name_of, read_objects, text_field, texts_field
from megasharp.errors import UserError
from megasharp.rewards.choice import ChoiceAnswer

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
        lines = [f"{label}. {option}" for label, option in zip(self.answer.labels, self.options, strict=True)]
        return "\n".join([self.question, "Options:", *lines])


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
    options, labels = texts_field(choices, "text", where), texts_field(choices, "label", where)
    if len(options) != len(labels) or len(set(labels)) < len(labels):
        raise UserError(f"{where}: 'label' must name each option of 'text' once")
    return _record(fields, name_of(fields, ("id",), path, where), options, labels, ("answerKey", where))


def read_mmlu_pro(fields: Fields, path: Path, where: str) -> ChoiceRecord:
    """A row of MMLU-Pro; without an id it is named after `path`. Raises UserError naming `where`."""
    options = tuple(option for option in texts_field(fields, "options", where) if option != _NO_OPTION)
    if len(options) > len(ascii_uppercase):
        raise UserError(f"{where}: 'options' has more than {len(ascii_uppercase)} options, one for each letter")
    labels = tuple(ascii_uppercase[: len(options)])
    return _record(fields, name_of(fields, ("question_id", "id"), path, where), options, labels, ("answer", where))


def _record(
    fields: Fields, name: str, options: tuple[str, ...], labels: tuple[str, ...], answer: tuple[str, str]
) -> ChoiceRecord:
    key, where = answer
    label = text_field(fields, key, where)
    if label not in labels:
        raise UserError(f"{where}: '{key}' must be one of the labels {', '.join(labels)}, got {label!r}")
    return ChoiceRecord(name, text_field(fields, "question", where), options, ChoiceAnswer(label, labels))
