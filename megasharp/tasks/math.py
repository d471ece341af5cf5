"""Problems of mathematics with a known answer: JSONL with the fields of MATH-500.

Schema of HuggingFaceH4/MATH-500, `test.jsonl`: `problem`, `solution`, `answer`, `subject`, `level`, `unique_id`. Read
are `problem`, `answer` and, for the id, `unique_id` or `id`; a file of one's own needs no more than the first two.

The verifier compares the last box of a response with the known answer, by math-verify's parser and sympy's algebra. Two
answers are the same where they are the same text; else where they are the same words, or the same number of the same
unit, percent or base; else where math-verify finds them equal. A decimal stands for its exact value, and one of at
least six digits also for what rounds to it. The library's own limit of time is SIGALRM, which in a thread fails and in
a worker fights with its parent's: it is off. `math_bounds` and the pool of workers bound the time.

Conventions of the data sets that are not mathematics: a unit, a degree sign or a percent sign that only one of the two
has is left out; so is a base; the interval (1,2) and the pair (1,2) are the same answer, and so is the list 1, 2. A
capital is its small letter, as math-verify has it, unless an answer uses both (`math_bounds`); `i` is the imaginary
unit where the other answer is a number that is not real.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.extraction import (
    check_names,
    last_box,
    last_line,
    last_stated,
    name_of,
    number_field,
    read_objects,
    text_field,
)
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.math_bounds import MAX_LENGTH, beyond, stand_ins, with_stand_ins, without_stand_ins
from megasharp.tasks.math_text import (
    bracket,
    in_base,
    is_row,
    is_words,
    plain,
    same_text,
    without_percent,
    without_spaces,
    without_unit,
    words,
)
from megasharp.tasks.prompts import boxed_prompt


@dataclass(frozen=True, slots=True)
class MathRecord:
    r"""One line of a data file.

    Example: `{"id": "half", "problem": "What is $1 - \\frac12$?", "answer": "\\frac{1}{2}"}`.
    """

    id: str
    problem: str
    answer: MathAnswer


def read_records(path: Path) -> list[MathRecord]:
    """Read a JSONL file of problems. Raises UserError, naming the file and the line, for what it must not hold."""
    records = [
        MathRecord(
            name_of(fields, ("unique_id", "id"), path, where),
            text_field(fields, "problem", where),
            MathAnswer(number_field(fields, "answer", where)),
        )
        for where, fields in read_objects(path, "write lines with 'problem' and 'answer'")
    ]
    check_names([record.id for record in records], path)
    return records


# Words after a number that make another one of it.
_CHANGING = (
    r"(?:or|and|to|times|plus|minus|over|by|divided|multiplied|squared|cubed|factorial|choose|mod|modulo|raised|half"
    r"|halves|thirds|quarters|tenths|hundredths|dozen|hundred|thousand|million|billion|trillion|pi|sqrt|sin|cos|tan|log"
    r"|ln|exp)\b"
)
# Text that leaves the number before it as it is: signs that close, then the end of line or sentence, words, a unit.
_UNCHANGED = (
    r"(?:[\s*$)\]}]|\\[)\],;: ]|\^\s*\{?\\circ\}?|°)*"
    rf"(?:$|[.?](?:[\s*$\\)\]\"']|$)|[,;:]\s+(?!{_CHANGING})[A-Za-z]{{2}}|[,;:]\s*$"
    rf"|(?<=[\s*$)])(?!{_CHANGING})(?:[A-Za-z][A-Za-z']+|[msgh])(?![A-Za-z0-9({{\\])"
    r"|(?:[cmk]m|kg|ft|mph)(?![A-Za-z])|\\(?:text|textrm|mathrm|mbox)\s*\{\s*[A-Za-z])(?!.*\bor\s+[$\\(]*-?\d)"
)
_NUMBER = re.compile(
    r"[\s$*(\\]*?(-?\s?\$?(?:\\[dt]?frac\{\d+\}\{\d+\}|\d+(?:,\d+)*(?:\.\d+)?(?:\s?/\s?\d+)?)"
    rf"(?:\s?(?:\\?%|percent\b))?){_UNCHANGED}"
)


@dataclass(frozen=True, slots=True)
class MathAnswer(TaskAnswer):
    r"""The known answer, as the data set writes it: LaTeX or plain text, with or without a box or dollar signs.

    `line`: the prompt asks for a line `Answer: ...`, of which all is read then. It is no part of digests, which have
    the prompt.

    Example: `MathAnswer(r"\frac{1}{2}")`.
    """

    gold: str
    line: bool = field(default=False, repr=False)

    def on_a_line(self, wanted: bool) -> MathAnswer:
        """Return it with that `line`."""
        return replace(self, line=wanted)


def answer_of(text: str) -> MathAnswer:
    """Return the answer of a user's own row: what follows the last `####`, as GSM8K writes solutions, or all of it."""
    number = text.rpartition("####")[2].strip() if "####" in text else ""
    return MathAnswer(number.replace(",", "") or text)


def verify(text: str, answer: TaskAnswer) -> Verdict:
    r"""Judge a response by its last box, or, where it has none, by a number after its last "answer is" or "####".

    Where the prompt asks for a line `Answer: ...` (`MathAnswer.line`), such a line may state any answer.

    The number must stand alone, or with a unit or words that leave it as it is: `7x`, `7!` and "7 or 8" state none.
    FORMAT: neither, or an empty box. What sympy raises passes through, to be an ERROR. The canonical answer of a
    correct response is that of the known answer, so that all correct ones are one; of a wrong one it is `canonical`.
    What is too large for sympy (`math_bounds`) is compared as text, and says so. Rewards are 1.0 or 0.0.

    Example: `verify(r"... so \boxed{0.5}", MathAnswer(r"\frac{1}{2}"))` is `Verdict(Outcome.CORRECT, 1.0, "1/2", "")`.
    """
    assert isinstance(answer, MathAnswer)
    found = answer_in(text, answer.line)
    if not found:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer" if found is None else "an empty box")
    gold = plain(last_box(answer.gold) or answer.gold)
    given = plain(found)
    bound = beyond(given) or beyond(gold)
    if same_text(gold, given) or (bound is None and _same(gold, given)):
        return Verdict(Outcome.CORRECT, 1.0, canonical(gold))
    right_name, name = canonical(gold), canonical(given)
    if name == right_name:
        # The name of a wrong answer is never that of the right one: `5 m` where that is 5 cm.
        name = _short(given) + " (wrong)" * (_short(given) == name)
    return Verdict(Outcome.WRONG, 0.0, name, f"compared as text only: {bound}" if bound else "")


def load_library() -> None:
    """Import the algebra now: for the process that workers are forked from, before the first of them."""
    importlib.import_module("megasharp.tasks.math_algebra")


def answer_in(text: str, line: bool = False) -> str | None:
    """The text of the answer that a response gives; None where it gives none. `line`: `Answer: ...` may give any."""
    box = last_box(text)
    if box is not None:
        return box
    number = _NUMBER.match(last_stated(text) or "")
    if number is not None:
        return number[1]
    return last_line(text) if line else None


def canonical(text: str) -> str:
    r"""One text for equal answers, as far as that is cheap to know. Example: `canonical(r"\frac{2}{4}")` is `1/2`.

    Rational numbers are exact, others are given to 12 digits; sums and products are expanded; sets are sorted.
    """
    from megasharp.tasks.math_algebra import name_of, parse

    text = plain(text)
    if is_words(text):
        return words(text)
    value = without_unit(text)[0]
    capitals = stand_ins(value)
    unread = beyond(text) or in_base(text) or is_row(text)
    parsed = None if unread else parse(with_stand_ins(value, capitals))
    try:
        return _short(text) if parsed is None else without_stand_ins(name_of(parsed), capitals)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return _short(text)


def _short(text: str) -> str:
    return without_spaces(text)[:MAX_LENGTH]


def _same(gold: str, given: str) -> bool:
    """Compare two plain answers by words, bases, units and percent, then by algebra."""
    from megasharp.tasks.math_algebra import equal

    if is_words(gold) or is_words(given):
        return words(gold) == words(given)
    if is_row(gold) or is_row(given):
        return False
    if in_base(gold) or in_base(given):
        return _same_in_base(gold, given)
    if {bracket(gold), bracket(given)} == {"{", "("}:
        return False
    gold, given = _in_radians(gold, given), _in_radians(given, gold)
    (gold, gold_unit), (given, given_unit) = without_unit(gold), without_unit(given)
    if gold_unit and given_unit and gold_unit != given_unit:
        return False
    (gold, gold_percent), (given, given_percent) = without_percent(gold), without_percent(given)
    if equal(gold, given):
        return True
    if gold_percent == given_percent:
        return False
    return equal(_hundredth(gold) if gold_percent else gold, _hundredth(given) if given_percent else given)


def _in_radians(text: str, other: str) -> str:
    """Degrees as radians where the other answer speaks of pi; elsewhere a degree sign is a unit like others."""
    return text.replace(r"^\circ", r"\cdot\frac{\pi}{180}") if r"\pi" in other and r"\pi" not in text else text


def _hundredth(text: str) -> str:
    return rf"\frac{{{text}}}{{100}}"


def _same_in_base(gold: str, given: str) -> bool:
    """Numbers with a base have a value; one without is in base ten, or in the base that the known answer names."""
    known, read = in_base(gold), in_base(given)
    if known and not read and known[0] == given:
        return True
    values = [
        int(*each) if each else int(text) if text.isdecimal() else None for each, text in ((known, gold), (read, given))
    ]
    return values[0] is not None and values[0] == values[1]


def load_items(path: Path) -> list[TaskItem]:
    """Problems of mathematics from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "math", boxed_prompt(record.problem), record.answer, path.name, question=record.problem)
        for record in read_records(path)
    ]
