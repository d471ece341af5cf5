"""A reward with a good and a better answer for the prolonged runs: solutions that divide earn more than others.

The quickstart's base finds solutions without a division five times as often, so these are the actions that the first
stage of 2510.04028 amplifies; its second stage would pass their share on to the better ones.
"""

from __future__ import annotations

from megasharp.common.records import Outcome
from megasharp.tasks.countdown import CountdownAnswer, verify

GOOD = 0.7


def graded(
    data_source: object, solution_str: str, ground_truth: CountdownAnswer, extra_info: object
) -> dict[str, float]:
    """Return 1 for a solution with a division, 0.7 for another one and 0 for anything else, and which of them it is."""
    solved = verify(solution_str, ground_truth).outcome is Outcome.CORRECT
    divides = "/" in solution_str
    good, better = float(solved and not divides), float(solved and divides)
    return {"score": GOOD * good + better, "good": good, "better": better}
