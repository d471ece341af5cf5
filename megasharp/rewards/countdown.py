"""Countdown: reach a target from given numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.rewards.arithmetic import NotArithmeticError, parse
from megasharp.types import Outcome, TaskAnswer, Verdict


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
    try:
        form, used = parse(text)
    except NotArithmeticError as error:
        return Verdict(Outcome.FORMAT, 0.0, None, str(error))
    except ZeroDivisionError:
        return Verdict(Outcome.WRONG, 0.0, None, "divides by zero")
    if sorted(used) != sorted(answer.numbers):
        return Verdict(Outcome.WRONG, 0.0, form.text, "does not use each number exactly once")
    if form.value != answer.target:
        return Verdict(Outcome.WRONG, 0.0, form.text, "misses the target")
    return Verdict(Outcome.CORRECT, 1.0, form.text)
