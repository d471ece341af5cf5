"""Solution multiplicity: how many distinct solutions a problem has, where a solver knows (2511.19942 equation 2).

The paper counts a suite's mean; here each problem has its own, and the share of its solutions among the samples. What
is one solution is what is one canonical answer: an expression up to order and nesting for Countdown.
"""

from __future__ import annotations

from functools import lru_cache

from megasharp.rewards.countdown import CountdownAnswer
from megasharp.rewards.countdown_solver import count_solutions
from megasharp.rewards.countdown_tags import TaggedCountdownAnswer
from megasharp.rewards.knights import KnightsAnswer
from megasharp.types import TaskAnswer

# Five numbers take the solver about a second a problem; a suite would wait for minutes.
_MOST_NUMBERS = 4


def solution_count(answer: TaskAnswer) -> int | None:
    """The number of distinct solutions; None where no solver knows, or it would take long.

    Countdown with up to four numbers is searched whole; a puzzle of knights and knaves has one solution by its making.
    """
    match answer:
        case CountdownAnswer(numbers, target) | TaggedCountdownAnswer(numbers, target):
            return _countdown(tuple(sorted(numbers)), target)
        case KnightsAnswer():
            return 1
        case _:
            return None


@lru_cache(maxsize=1 << 16)
def _countdown(numbers: tuple[int, ...], target: int) -> int | None:
    return count_solutions(numbers, target) if 1 <= len(numbers) <= _MOST_NUMBERS else None
