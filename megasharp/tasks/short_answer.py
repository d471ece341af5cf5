r"""BIG-Bench Hard: a question and the short text that answers it, with the boxed prompt.

Schema of lukaemon/bbh: `input`, `target`, one configuration a task. The authors' own repository
(suzgunmirac/BIG-Bench-Hard, `bbh/<task>.json`) has the same objects in the list `examples` of one; write one a line.

The verifier wants the same text, after what does not count is taken away. BBH (2210.09261, section 3) counts exact
matches with what follows "the answer is" in a response, which its few-shot prompts end with: "So the answer is (B)."
lm-evaluation-harness does the same, and drops the full stop. Ours: a box counts before the sentence. Case, bold marks,
quotes and commands such as `\mathbf{}` are taken away, commas of thousands from numbers, spaces from brackets; "yes"
and its kind may go on ("yes, because ..."). Of a target such as `(B)` the label is wanted (`labels.py`), with or
without its option's text. A brace may stand as is or as `\{`; a target that is not balanced, such as `> ) }`, is found
in a box that closes after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import check_names, name_of, number_field, read_objects, text_field
from megasharp.tasks.extraction import last_box, last_stated, own_part
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.labels import chosen_label
from megasharp.tasks.prompts import boxed_prompt
from megasharp.tasks.retraction import TAKEN_BACK, withdrawn
from megasharp.tasks.wording import undressed


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
            answer_to(text_field(fields, "input", where), number_field(fields, "target", where)),
        )
        for where, fields in read_objects(path, "write lines with 'input' and 'target'")
    ]
    check_names([record.id for record in records], path)
    return records


MAX_LENGTH = 1000

_OPTION = re.compile(r"^\s*\(([A-Z])\)\s*(\S.*?)\s*$", re.MULTILINE)
_CHOICE = re.compile(r"\(([A-Z])\)")
_BRACKETS = re.compile(r"[][(){}<>\s]*")
_NUMBER = re.compile(r"[-+]?[\d,]+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d)[, ](?=\d{3}(?!\d))")
_WHOLE = re.compile(r"(?<=\d)\.0+$")
_REASON = re.compile(r"[\s,;.]*(?:because|since)\b")
# Words of which an answer is one, and what may follow it: the rest of a sentence, in which no other one is named.
_KINDS = (("yes", "no"), ("true", "false"), ("valid", "invalid"), ("plausible", "implausible"))
_GOES_ON = re.compile(r"(\w+)(?=[,.;:]\s|\s(?:-|because|since)\s)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShortAnswer(TaskAnswer):
    """The text that is the answer, and the options of a question that lists some.

    Options are no part of digests, which have the prompt.

    Example: `ShortAnswer("(B)")`, `ShortAnswer("valid")`, `ShortAnswer("] ) }")`.
    """

    target: str
    options: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)


def answer_to(question: str, target: str) -> ShortAnswer:
    """Return the answer to a question, with the options that the question lists as `(A) text`, a line each."""
    options = tuple(_OPTION.findall(question)) if _CHOICE.fullmatch(target.strip()) else ()
    return ShortAnswer(target, options)


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge the last box of a response, or what follows its last "answer is". Rewards are 1.0 or 0.0.

    FORMAT: neither, or nothing in it. Wrong without a canonical answer: one taken back. The canonical answer is the
    text without what does not count.

    Example: `verify("So the answer is valid.", ShortAnswer("valid"))` is `Verdict(Outcome.CORRECT, 1.0, "valid", "")`.
    """
    assert isinstance(answer, ShortAnswer)
    text = own_part(text)
    target = bare(answer.target)
    choice = _CHOICE.fullmatch(answer.target.strip())
    label = chosen_label(text, dict(answer.options) or dict.fromkeys(ascii_uppercase, "")) if choice else None
    if label is not None:
        return _verdict(f"({label})", answer.target.strip())
    if withdrawn(text):
        return Verdict(Outcome.WRONG, 0.0, None, TAKEN_BACK)
    box = last_box(text)
    if _BRACKETS.fullmatch(answer.target):
        # A target that is not balanced closes its box too early: it is enough that the last box begins with all of it.
        after = text.rpartition("\\boxed{")[2][: 2 * MAX_LENGTH]
        signs = "".join(map(_bracket, "".join(answer.target.split())))
        box = answer.target if re.match(rf"(?:\\text\s*\{{)?{signs}\s*\}}", after) else box
    given = bare(box if box is not None else last_stated(text) or "")
    if not given or len(given) > MAX_LENGTH:
        return Verdict(Outcome.FORMAT, 0.0, None, "no short answer")
    if _BRACKETS.fullmatch(target):
        given, target = ("".join(each.split()) for each in (given, target))
    elif _NUMBER.fullmatch(target):
        given, target = (_WHOLE.sub("", _THOUSANDS.sub("", each)).removeprefix("+") for each in (given, target))
    return _verdict(_first_word(given, target), target)


def _verdict(given: str, target: str) -> Verdict:
    right = given == target
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG, float(right), given)


def _bracket(sign: str) -> str:
    """Return the pattern of a bracket that may stand as it is, or escaped, after spaces."""
    return rf"\s*\\?{re.escape(sign)}"


def _first_word(given: str, target: str) -> str:
    """Return the word of an answer such as "yes, you return", where the target is of its kind; else all of it."""
    kind = next((kind for kind in _KINDS if target in kind), None)
    match = _GOES_ON.fullmatch(given) if kind else None
    if kind is None or match is None or match[1] not in kind:
        return given
    others = set(kind) - {match[1]}
    if _REASON.match(match[2]):
        return match[1]
    return given if others.intersection(re.findall(r"\w+", match[2])) else match[1]


def bare(text: str) -> str:
    r"""An answer without what does not count: case, dress, quotes, a closing full stop.

    Example: `bare(r" **\text{Yes}**. ")` is `yes`.
    """
    text = undressed(text[: 2 * MAX_LENGTH].replace("``", '"').replace("''", '"'))
    text = text.replace("**", "").replace("\\{", "{").replace("\\}", "}").strip("* ").removeprefix("- ")
    text = text.removesuffix(".").removesuffix("!").strip()
    for sign in "`\"'":
        if len(text) > 2 and text.startswith(sign) and text.endswith(sign):
            text = text[1:-1].strip()
    return text.removesuffix(".").strip().casefold()


def load_items(path: Path) -> list[TaskItem]:
    """Short answers from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(
            record.id, "short_answer", boxed_prompt(record.question), record.answer, path.name, question=record.question
        )
        for record in read_records(path)
    ]
