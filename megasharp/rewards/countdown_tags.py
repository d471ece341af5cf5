"""Countdown as TinyZero asks for it: a response thinks, then gives the equation between `<answer>` and `</answer>`.

The rules are TinyZero's (verl/utils/reward_score/countdown.py): the last tags count, each number must be used exactly
once, 0.1 for tags whatever is in them, 1.0 for the target, else 0. Differences, all stricter or exact: the grammar is
that of `arithmetic` (no `**`, `//`, decimals or signs, which TinyZero hands to eval), values are fractions instead of
floats within 1e-5, and tags count on any line, not only on the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megasharp.rewards import countdown
from megasharp.rewards.extraction import last_tag
from megasharp.types import Outcome, TaskAnswer, Verdict


@dataclass(frozen=True, slots=True)
class TaggedCountdownAnswer(TaskAnswer):
    """The problem itself, and what tags earn around anything but a solution.

    Example: `TaggedCountdownAnswer((19, 36, 55, 7), 65)`.
    """

    numbers: tuple[int, ...]
    target: int
    tags_reward: float = 0.1


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge what stands in the last answer tags as `countdown.verify` judges a whole response.

    Without tags it is FORMAT with reward 0.0; what is no expression inside of them is FORMAT too, with `tags_reward`.

    Example: `verify("55+36=91 ... <answer>55+36-7-19</answer>", TaggedCountdownAnswer((19, 36, 55, 7), 65))` is
    `Verdict(Outcome.CORRECT, 1.0, "36+55-19-7", "")`.
    """
    assert isinstance(answer, TaggedCountdownAnswer)
    expression = last_tag(text)
    if expression is None:
        return Verdict(Outcome.FORMAT, 0.0, None, "no answer tags")
    verdict = countdown.verify(expression, countdown.CountdownAnswer(answer.numbers, answer.target))
    return verdict if verdict.outcome is Outcome.CORRECT else replace(verdict, reward=answer.tags_reward)
