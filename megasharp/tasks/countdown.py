"""Countdown: reach a target from given numbers, each used exactly once, with + - * / and parentheses.

A seeded generator makes solvable problems, of which data files hold one a line; the verifier judges a response exactly.
An exhaustive solver gives all solutions of a problem that differ in the verifier's canonical form. For a multiset of
numbers the solver combines the forms of every way to cut it in two; forms of parts are shared between problems through
a cache. Four numbers take milliseconds, five about a second the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from random import Random

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.arithmetic import Form, NotArithmeticError, combine, number, parse
from megasharp.tasks.data_fields import check_names, positive_field, positives_field, read_objects, text_field
from megasharp.tasks.judge import TaskItem


@dataclass(frozen=True, slots=True)
class CountdownRange:
    """The range of problems to make: numbers from 1 to `largest_number`, targets from 1 to `largest_target`."""

    largest_number: int = 9
    largest_target: int = 40


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """A problem and the solution it was made from.

    Example: `CountdownProblem((3, 5, 7, 8), 24, "((8-5)*7)+3")`.
    """

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """The numbers in any order and the target, equal for two problems that are the same."""
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True, slots=True)
class CountdownRecord:
    """One line of a data file. `solutions` counts the distinct solutions; None where the file does not say.

    Example: `{"id": "countdown-4-00017", "numbers": [3, 5, 7, 8], "target": 24, "solutions": 9}`.
    """

    id: str
    numbers: tuple[int, ...]
    target: int
    solutions: int | None

    @property
    def answer(self) -> CountdownAnswer:
        """The problem as the verifier needs it."""
        return CountdownAnswer(self.numbers, self.target)


def prompt_text(numbers: Sequence[int], target: int) -> str:
    """The prompt of a problem, for instance `3 5 7 8=24:`; a response is an expression and the end token."""
    return f"{' '.join(map(str, numbers))}={target}:"


def make_problem(rng: Random, count: int, within: CountdownRange | None = None) -> CountdownProblem:
    """A random solvable problem of `count` numbers: a random expression whose value is a target in range."""
    within = within or CountdownRange()
    while True:
        numbers = tuple(rng.randint(1, within.largest_number) for _ in range(count))
        solution, value = random_expression(rng, rng.sample(numbers, count))
        if value.denominator == 1 and 1 <= value <= within.largest_target:
            return CountdownProblem(numbers, int(value), solution)


def random_expression(rng: Random, numbers: Sequence[int]) -> tuple[str, Fraction]:
    """A random expression over `numbers` in this order, inner operations in parentheses, and its value."""
    if len(numbers) == 1:
        return str(numbers[0]), Fraction(numbers[0])
    cut = rng.randint(1, len(numbers) - 1)
    left, left_value = random_expression(rng, numbers[:cut])
    right, right_value = random_expression(rng, numbers[cut:])
    exact = right_value != 0 and (left_value / right_value).denominator == 1
    operator = rng.choice("+-*/" if exact else "+-*")
    value = {
        "+": left_value + right_value,
        "-": left_value - right_value,
        "*": left_value * right_value,
        "/": left_value / right_value if exact else Fraction(0),
    }[operator]
    return f"{_inner(left)}{operator}{_inner(right)}", value


def _inner(expression: str) -> str:
    return expression if expression.isdigit() else f"({expression})"


def read_records(path: Path) -> list[CountdownRecord]:
    """Read a JSONL file of problems: objects with `id`, `numbers`, `target` and optionally `solutions`.

    Raises UserError, naming the file and the line, for a missing or empty file, a bad line, a repeated id.
    """
    records: list[CountdownRecord] = []
    for where, fields in read_objects(path, "make one with tools/make_countdown_data.py"):
        solutions = None if fields.get("solutions") is None else positive_field(fields, "solutions", where)
        name, numbers = text_field(fields, "id", where), positives_field(fields, "numbers", where)
        records.append(CountdownRecord(name, numbers, positive_field(fields, "target", where), solutions))
    check_names([record.id for record in records], path)
    return records


@dataclass(frozen=True, slots=True)
class CountdownAnswer(TaskAnswer):
    """The problem itself, which is all it takes to judge a response.

    Example: `CountdownAnswer((3, 5, 7, 8), 24)`.
    """

    numbers: tuple[int, ...]
    target: int


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge a response, exactly (rational arithmetic, no rounding, no eval). Rewards are 1.0 or 0.0.

    FORMAT: not an expression of the grammar in `arithmetic`, or beyond its bounds; no canonical answer.
    WRONG: an expression with other numbers or another value; also one that divides by zero, which is a
    wrong answer of the model and no fault of the verifier (that would be ERROR), but has no value and so no
    canonical answer.
    CORRECT: the target, from exactly the given numbers. The canonical answer is that of `canonical`.

    Example: `verify("(8-5)*7+3", CountdownAnswer((3, 5, 7, 8), 24))` is
    `Verdict(Outcome.CORRECT, 1.0, "(8-5)*7+3", "")`.
    """
    assert isinstance(answer, CountdownAnswer)
    return verify_expression(text, answer)


def verify_expression(text: str, answer: CountdownAnswer, *, signed: bool = False) -> Verdict:
    """Judge as `verify` does; with `signed`, a minus sign may stand before a first term."""
    try:
        form, used = parse(text, signed)
    except NotArithmeticError as error:
        return Verdict(Outcome.FORMAT, 0.0, None, str(error))
    except ZeroDivisionError:
        return Verdict(Outcome.WRONG, 0.0, None, "divides by zero")
    if sorted(used) != sorted(answer.numbers):
        return Verdict(Outcome.WRONG, 0.0, form.text, "does not use each number exactly once")
    if form.value != answer.target:
        return Verdict(Outcome.WRONG, 0.0, form.text, "misses the target")
    return Verdict(Outcome.CORRECT, 1.0, form.text)


MAX_NUMBERS = 5


def solve(numbers: tuple[int, ...], target: int) -> list[str]:
    """All distinct solutions in canonical form, sorted; empty if there is none.

    `numbers` are non-negative. Raises ValueError for none, or for more than `MAX_NUMBERS`, which would take
    too long.

    Example: `solve((1, 2, 3), 7)` is `["1+2*3"]`.
    """
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"the exhaustive solver takes 1 to {MAX_NUMBERS} numbers, got {len(numbers)}")
    if len(numbers) == 1:
        return [str(numbers[0])] if numbers[0] == target else []
    goal = Fraction(target)
    found = {
        combine(operator, left, right).text
        for first, second in _cuts(tuple(sorted(numbers)))
        for a in _forms(first)
        for b in _forms(second)
        for operator, left, right in _reaching(a, b, goal)
    }
    return sorted(found)


def count_solutions(numbers: tuple[int, ...], target: int) -> int:
    """The solution multiplicity of a problem: how many distinct solutions it has."""
    return len(solve(numbers, target))


def _cuts(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to cut a sorted multiset into two non-empty sorted parts, each unordered pair once."""
    cuts: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    everywhere = range(len(numbers))
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in combinations(everywhere, size):
            first = tuple(numbers[i] for i in chosen)
            second = tuple(numbers[i] for i in everywhere if i not in chosen)
            if (second, first) not in cuts:
                cuts.add((first, second))
    return cuts


@lru_cache(maxsize=4096)
def _forms(numbers: tuple[int, ...]) -> tuple[Form, ...]:
    """Every distinct form that uses the sorted multiset `numbers` whole."""
    if len(numbers) == 1:
        return (number(numbers[0]),)
    forms: dict[str, Form] = {}
    for first, second in _cuts(numbers):
        for a in _forms(first):
            for b in _forms(second):
                for form in _all_combinations(a, b):
                    forms[form.text] = form
    return tuple(forms.values())


def _all_combinations(a: Form, b: Form) -> Iterator[Form]:
    yield combine("+", a, b)
    yield combine("-", a, b)
    yield combine("-", b, a)
    yield combine("*", a, b)
    if b.value:
        yield combine("/", a, b)
    if a.value:
        yield combine("/", b, a)


def _reaching(a: Form, b: Form, goal: Fraction) -> Iterator[tuple[str, Form, Form]]:
    """The operations on `a` and `b` worth `goal`, found by value: building a form costs far more."""
    x, y = a.value, b.value
    if x + y == goal:
        yield "+", a, b
    if x - y == goal:
        yield "-", a, b
    if y - x == goal:
        yield "-", b, a
    if x * y == goal:
        yield "*", a, b
    if y and x == goal * y:
        yield "/", a, b
    if x and y == goal * x:
        yield "/", b, a


def load_items(path: Path) -> list[TaskItem]:
    """Countdown problems from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(
            id=record.id,
            task="countdown",
            text=prompt_text(record.numbers, record.target),
            answer=record.answer,
            source=path.name,
        )
        for record in read_records(path)
    ]
