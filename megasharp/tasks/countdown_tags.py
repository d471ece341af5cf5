r"""Countdown-Tasks-3to4: problems of three or four numbers, with TinyZero's prompt for Qwen's instruct models.

2511.19942 trains those, with that prompt (the template `countdown_qwen`); a response goes on inside of `<think>`.

Schema of Jiayi-Pan/Countdown-Tasks-3to4: `target` (integer) and `nums` (a list of 3 or 4 integers), as TinyZero reads
it (examples/data_preprocess/countdown.py; the card itself could not be read). Its prompt says "each number can only be
used once", its reward wants each number exactly once. Countdown-3 of 2511.19942 (appendix C.4) is the rows of three.

A response thinks, then gives the equation between `<answer>` and `</answer>`. The verifier's rules are TinyZero's
(verl/utils/reward_score/countdown.py): the last tags count, each number must be used exactly once, 0.1 for tags
whatever is in them, 1.0 for the target, else 0. Differences: the grammar is that of `arithmetic`, with a minus sign
before a first term (no `**`, `//` or decimals, which TinyZero hands to eval); values are fractions instead of floats
within 1e-5; tags count on any line, not only on the last; operators may be Unicode's or LaTeX's (`\div`), and a true
`= 24` may stand behind the expression, which TinyZero refuses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks import countdown
from megasharp.tasks.arithmetic import MAX_CHARACTERS
from megasharp.tasks.data_fields import check_names, name_of, positive_field, positives_field, read_objects
from megasharp.tasks.extraction import last_tag
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.retraction import TAKEN_BACK, withdrawn
from megasharp.tasks.wording import undressed


@dataclass(frozen=True, slots=True)
class TaggedCountdownRecord:
    """One line of a data file. Example: `{"target": 65, "nums": [19, 36, 55, 7]}`."""

    id: str
    answer: TaggedCountdownAnswer


def question_of(numbers: Sequence[int], target: int) -> str:
    """TinyZero's question, before any template."""
    return f"Using the numbers {list(numbers)}, create an equation that equals {target}."


def read_records(path: Path, count: int | None = None) -> list[TaggedCountdownRecord]:
    """Read a JSONL file of problems, those of `count` numbers where it is given.

    Raises UserError, naming the file and the line, for a bad one, and where no problem has `count` numbers.
    """
    records = [
        TaggedCountdownRecord(
            name_of(fields, ("id",), path, where),
            TaggedCountdownAnswer(positives_field(fields, "nums", where), positive_field(fields, "target", where)),
        )
        for where, fields in read_objects(path, "write lines with 'nums' and 'target'")
    ]
    check_names([record.id for record in records], path)
    kept = [record for record in records if count in (None, len(record.answer.numbers))]
    if not kept:
        raise UserError(f"{path}: no problem of {count} numbers in this data file; use data.task=countdown_3to4")
    return kept


@dataclass(frozen=True, slots=True)
class TaggedCountdownAnswer(TaskAnswer):
    """The problem itself, and what tags earn around anything but a solution.

    Example: `TaggedCountdownAnswer((19, 36, 55, 7), 65)`.
    """

    numbers: tuple[int, ...]
    target: int
    tags_reward: float = 0.1


_OPERATORS = {
    **dict.fromkeys(map(ord, "\u00d7\u2715\u2217\u22c5\u00b7\u2219"), "*"),
    **dict.fromkeys(map(ord, "\u00f7\u2215\u2044"), "/"),
}
_COMMANDS = ((r"\times", "*"), (r"\cdot", "*"), (r"\ast", "*"), (r"\div", "/"), ("[", "("), ("]", ")"))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MARKED = re.compile(r"^(`|\*\*)([^`]*)\1$")
# The letter between two operands.
_TIMES = re.compile(r"(?<=[\d)])\s*[xX]\s*(?=[\d(])")
_NUMBER = re.compile(r"(\d{1,9})(?:\.0+)?\.?", re.ASCII)
_EQUALS = re.compile(r"==?")


def spelled(text: str) -> str:
    r"""Return an expression as `arithmetic` has it: in ASCII and without LaTeX, its brackets round.

    Example: `spelled(r"\frac{48}{6} \times [2 - 1]")` is `((48)/(6)) * (2 - 1)`.
    """
    text = text.strip()
    # What is longer is refused by the parser, however it is spelled.
    if len(text) > 4 * MAX_CHARACTERS:
        return text
    fraction = _FRACTION.search(text)
    while fraction is not None:
        text = _FRACTION.sub(r"((\1)/(\2))", text)
        fraction = _FRACTION.search(text)
    text = undressed(_MARKED.sub(r"\2", text)).translate(_OPERATORS)
    for command, sign in _COMMANDS:
        text = text.replace(command, sign)
    return _TIMES.sub(" * ", text)


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge the text in the last answer tags as `countdown.verify` judges a whole response.

    It may be spelled with other signs (`spelled`), and say its value, before or after it: `3*8 = 24`. Without tags it
    is FORMAT with reward 0.0. Tags around anything but an expression are FORMAT too, but earn `tags_reward`.

    Example: `verify("55+36=91 ... <answer>55+36-7-19</answer>", TaggedCountdownAnswer((19, 36, 55, 7), 65))` is
    `Verdict(Outcome.CORRECT, 1.0, "36+55-19-7", "")`.
    """
    assert isinstance(answer, TaggedCountdownAnswer)
    expression = last_tag(text)
    if expression is None:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer tags")
    if withdrawn(text):
        return Verdict(Outcome.WRONG, answer.tags_reward, None, TAKEN_BACK)
    expression, said = _sides(spelled(expression))
    problem = countdown.CountdownAnswer(answer.numbers, answer.target)
    verdict = countdown.verify_expression(expression, problem, signed=True)
    if verdict.outcome is Outcome.CORRECT and said not in (None, answer.target):
        verdict = replace(verdict, outcome=Outcome.WRONG, detail=f"is said to equal {said}")
    return verdict if verdict.outcome is Outcome.CORRECT else replace(verdict, reward=answer.tags_reward)


def _sides(text: str) -> tuple[str, int | None]:
    """Return the expression of an equation and the value on its other side; the whole text and None for another one."""
    sides = [each.strip() for each in _EQUALS.split(text)]
    if len(sides) == 2:
        for expression, value in (sides, reversed(sides)):
            number = _NUMBER.fullmatch(value)
            if number is not None:
                return expression, int(number[1])
    return text, None


def load_items(path: Path, count: int | None = None) -> list[TaskItem]:
    """Problems of Countdown-Tasks-3to4, those of `count` numbers where it is given."""
    template = TEMPLATES["countdown_qwen"]
    found = ((record, question_of(record.answer.numbers, record.answer.target)) for record in read_records(path, count))
    return [
        TaskItem(record.id, "countdown_3to4", template.text_of(text), record.answer, path.name, question=text)
        for record, text in found
    ]


def load_items_of_three(path: Path) -> list[TaskItem]:
    """The problems of three numbers of Countdown-Tasks-3to4."""
    return [replace(item, task="countdown_3") for item in load_items(path, 3)]
