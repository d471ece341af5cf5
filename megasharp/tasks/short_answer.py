"""BIG-Bench Hard: a question and the short text that answers it, with the boxed prompt.

Schema of lukaemon/bbh: `input`, `target`, one configuration a task. The authors' own repository
(suzgunmirac/BIG-Bench-Hard, `bbh/<task>.json`) has the same objects in the list `examples` of one; write one a line.

The verifier wants the same text, after a few signs that do not count are taken away. BBH (2210.09261, section 3) counts
exact matches with what follows "the answer is" in a response, which its few-shot prompts end with: "So the answer is
(B)." lm-evaluation-harness does the same, and drops the full stop. Capital letters count there and here ("True", "yes",
"No" are what the targets say). Ours: a box counts before the sentence, bold marks, quotes and `\text{}` are taken away,
and of a target such as `(B)` the letter alone is enough. A brace may stand as is or as `\\{`; a target that is not
balanced, such as `> ) }`, is found in a box that closes after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.extraction import (
    check_names,
    ending,
    last_box,
    last_stated,
    name_of,
    number_field,
    read_objects,
    text_field,
)
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import boxed_prompt


@dataclass(frozen=True, slots=True)
class ShortAnswerRecord:
    """One line of a data file. Example: `{"input": "not ( True ) and ( True ) is", "target": "False"}`."""

    id: str
    question: str
    answer: ShortAnswer


def read_records(path: Path) -> list[ShortAnswerRecord]:
    """Read a JSONL file of problems. Raises UserError, naming the file and the line, for what it must not hold."""
    records = [
        ShortAnswerRecord(
            name_of(fields, ("id",), path, where),
            text_field(fields, "input", where),
            ShortAnswer(number_field(fields, "target", where)),
        )
        for where, fields in read_objects(path, "write lines with 'input' and 'target'")
    ]
    check_names([record.id for record in records], path)
    return records


MAX_LENGTH = 1000

_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_ESCAPED_BRACE = re.compile(r"\\([{}])")
_QUOTES = (("$", "$"), ("\\(", "\\)"), ("`", "`"), ('"', '"'), ("'", "'"))
_CHOICE = re.compile(r"\(([A-Z])\)")


@dataclass(frozen=True, slots=True)
class ShortAnswer(TaskAnswer):
    """The text that is the answer. Example: `ShortAnswer("(B)")`, `ShortAnswer("valid")`, `ShortAnswer("] ) }")`."""

    target: str


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge the last box of a response, or what follows its last "answer is". Rewards are 1.0 or 0.0.

    FORMAT: neither, or nothing in it. The canonical answer is the text without what does not count.

    Example: `verify("So the answer is valid.", ShortAnswer("valid"))` is `Verdict(Outcome.CORRECT, 1.0, "valid", "")`.
    """
    assert isinstance(answer, ShortAnswer)
    box = last_box(text)
    if {"{", "}"}.intersection(answer.target):
        # A target that is not balanced ends its box too early: the box counts if it begins with the whole target.
        after = ending(text).rpartition("\\boxed{")[2][: 2 * MAX_LENGTH]
        if "".join(after.split()).startswith("".join(answer.target.split()) + "}"):
            box = answer.target
    given = bare(box if box is not None else last_stated(text) or "")
    if not given or len(given) > MAX_LENGTH:
        return Verdict(Outcome.FORMAT, 0.0, None, "no short answer")
    target = bare(answer.target)
    choice = _CHOICE.fullmatch(target)
    if choice and given == choice[1]:
        given = target
    right = given == target
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), given)


def bare(text: str) -> str:
    r"""An answer without what does not count. Example: `bare(r" **\text{yes}**. ")` is `yes`."""
    text = _ESCAPED_BRACE.sub(r"\1", _COMMAND.sub(r"\1", text[: 2 * MAX_LENGTH]))
    text = " ".join(text.split()).removesuffix(".").strip("* ")
    for before, after in _QUOTES:
        if len(text) > len(before) + len(after) and text.startswith(before) and text.endswith(after):
            text = text[len(before) : -len(after)].strip()
    return text.removesuffix(".").strip()


def load_items(path: Path) -> list[TaskItem]:
    """Short answers from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(
            record.id, "short_answer", boxed_prompt(record.question), record.answer, path.name, question=record.question
        )
        for record in read_records(path)
    ]
