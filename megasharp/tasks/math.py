r"""Problems of mathematics with a known answer: JSONL with the fields of MATH-500.

Schema of HuggingFaceH4/MATH-500, `test.jsonl`: `problem`, `solution`, `answer`, `subject`, `level`, `unique_id`. Read
are `problem`, `answer` and, for the id, `unique_id` or `id`; a file of one's own needs no more than the first two.

The verifier compares what a response commits to (`math_stated`: the last box or statement) with the known answer. Both
are written in one way first (`math_characters`, `math_text`, `math_notation`), then compared (`math_comparison`): as
text, words and names; as lists, member by member (`math_lists`); the side of an equation that is its value
(`math_equations`); numbers of one unit, percent or base (`math_units`); and last by math-verify's parser and sympy's
algebra (`math_algebra`). A decimal stands for its exact value, one of at least six digits also for what rounds to it,
and one of at least 15 for what a float comes near. The library's own limit of time is SIGALRM, which in a thread fails
and in a worker fights with its parent's: it is off. `math_bounds` and the pool of workers bound the time.

Conventions of the data sets that are not mathematics: a unit, a degree sign or a percent sign that only one of the two
has is left out, but for a known answer from -1 to 1 a percentage is a hundredth only; so is a base; the interval (1,2)
and the pair (1,2) are the same answer, and so is the list 1, 2. A capital is its small letter, as math-verify has it,
unless an answer uses both (`math_bounds`); `i` is the imaginary unit where it is the one letter and the other answer is
complex; the constant of integration `C` may have another letter.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import check_names, name_of, number_field, read_objects, text_field
from megasharp.tasks.extraction import last_box
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.math_bounds import MAX_LENGTH, beyond, stand_ins, with_stand_ins, without_stand_ins
from megasharp.tasks.math_characters import as_latex
from megasharp.tasks.math_comparison import Comparison
from megasharp.tasks.math_lists import members, with_both_signs
from megasharp.tasks.math_stated import Commitment, commitment
from megasharp.tasks.math_text import (
    fraction_of,
    in_base,
    is_row,
    is_words,
    label_of,
    option_of,
    plain,
    same_text,
    without_spaces,
    words,
)
from megasharp.tasks.math_units import without_unit
from megasharp.tasks.prompts import boxed_prompt
from megasharp.tasks.retraction import TAKEN_BACK


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
    r"""Judge what a response commits to: its last box, or what it states as its answer after that or without one.

    A number that is stated must stand alone, or with a unit or words that leave it as it is: `7x`, `7!` and "7 or 8"
    state none. A formula must be in dollar signs and end its sentence. Where the prompt asks for a line `Answer: ...`
    (`MathAnswer.line`), such a line may state any answer.

    FORMAT: nothing is committed to, or an empty box. Wrong without a canonical answer: one that is taken back. The
    canonical answer of a correct response is that of the known answer, so that all correct ones are one; of a wrong
    one it is `canonical`. What is too large for sympy (`math_bounds`), and what it fails at, is compared as text, and
    the detail says so: only a fault of the machine is raised. Rewards are 1.0 or 0.0.

    Example: `verify(r"... so \boxed{0.5}", MathAnswer(r"\frac{1}{2}"))` is `Verdict(Outcome.CORRECT, 1.0, "1/2", "")`.
    """
    assert isinstance(answer, MathAnswer)
    found = commitment(text, answer.line)
    if found is None:
        return Verdict(Outcome.FORMAT, 0.0, None, "an empty box" if last_box(text) == "" else "no answer")
    if found.taken_back:
        return Verdict(Outcome.WRONG, 0.0, None, TAKEN_BACK)
    known = as_latex(answer.gold)
    known = last_box(known) or known
    gold = plain(known)
    comparison = Comparison()
    if _right(known, gold, found, comparison):
        return Verdict(Outcome.CORRECT, 1.0, canonical(gold))
    given = plain(", ".join(found.texts))
    right_name, name = canonical(gold), canonical(given)
    if name == right_name:
        # The name of a wrong answer is never that of the right one: `5 m` where that is 5 cm.
        name = _short(given) + " (wrong)" * (_short(given) == name)
    return Verdict(Outcome.WRONG, 0.0, name, f"compared as text only: {comparison.fault}" if comparison.fault else "")


def _right(answer: str, gold: str, found: Commitment, comparison: Comparison) -> bool:
    """Decide if a response commits to the known answer, and to nothing else.

    Boxes that are joined are a list, or one value in several spellings. Where the known answer is a list, the last
    boxes that stand together may each hold a part of it; of a pair only those that nothing but names and signs part.
    """
    given = ", ".join(found.texts)
    if label_of(gold) and option_of(given):
        return label_of(gold) == option_of(given)
    if same_text(answer, given) or comparison.same(gold, plain(given)):
        return True
    if len(found.texts) > 1 and all(comparison.same(gold, plain(each)) for each in found.texts):
        return True
    if gold.startswith("("):
        named = found.named
        return len(named) == len(members(gold[1:-1])[0]) > 1 and comparison.same(gold, plain(", ".join(named)))
    parts = found.listed
    listed = len(with_both_signs(members(gold)[0])) > 1
    return listed and len(parts) > len(found.texts) and comparison.same(gold, plain(", ".join(dict.fromkeys(parts))))


def load_library() -> None:
    """Import the algebra now: for the process that workers are forked from, before the first of them."""
    importlib.import_module("megasharp.tasks.math_algebra")


def canonical(text: str) -> str:
    r"""One text for equal answers, as far as that is cheap to know. Example: `canonical(r"\frac{2}{4}")` is `1/2`.

    Rational numbers are exact, others are given to 12 digits; sums and products are expanded; sets are sorted.
    """
    from megasharp.tasks.math_algebra import name_of, parse

    text = plain(text)
    if is_words(text):
        return words(text)
    value = without_unit(text)[0]
    number = fraction_of(value)
    if number is not None:
        return _short(str(number))
    if beyond(text) or in_base(text) or is_row(text):
        return _short(text)
    capitals = stand_ins(value)
    try:
        parsed = parse(with_stand_ins(value, capitals))
        return _short(text) if parsed is None else without_stand_ins(name_of(parsed), capitals)
    except MemoryError:
        raise
    # Python prints no integer of more than 4,300 digits, and sympy raises all kinds of errors.
    except Exception:
        return _short(text)


def _short(text: str) -> str:
    return without_spaces(text)[:MAX_LENGTH]


def load_items(path: Path) -> list[TaskItem]:
    """Problems of mathematics from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "math", boxed_prompt(record.problem), record.answer, path.name, question=record.problem)
        for record in read_records(path)
    ]
