"""Verdicts on noisy runs: what counts as a difference, and what a handful of settings adds up to.

A difference is clear when the seeds' mean exceeds two standard errors; of two settings, that of their paired
differences. One seed shows no clear difference, and no verdict may turn on an unclear one. Ours: the papers give no
errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megasharp.labs.softmax import Array
from megasharp.labs.study import Outcome
from megasharp.labs.tilting import Bools

ERRORS = 2.0


def outcome(holds: int, of: int) -> Outcome:
    """All cases: reproduced; none: differs; else partly."""
    if holds == of:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if holds == 0 else Outcome.PARTLY


def standard_error(value_R: Array) -> float:
    """Of the mean over seeds; infinite for one seed."""
    return float(value_R.std(ddof=1) / np.sqrt(len(value_R))) if len(value_R) > 1 else float("inf")


def clearly_above(value_R: Array, bound: float = 0.0) -> bool:
    """Whether the seeds' mean is above `bound` by more than two standard errors."""
    return bool(value_R.mean() - bound > ERRORS * standard_error(value_R))


def clearly_below(value_R: Array, bound: float = 0.0) -> bool:
    """Whether the seeds' mean is below `bound` by more than two standard errors."""
    return clearly_above(-value_R, -bound)


def clearly_rarer(hit_R: Bools, share: float) -> bool:
    """Whether fewer seeds are hits than two binomial standard errors below `share` of them.

    The error is that of seeds which are hits with probability `share`: seeds that agree have no spread of their own.

    Example: of 20 seeds 17 are clearly rarer than 0.99 and not clearly rarer than 0.9.
    """
    return bool(hit_R.mean() < share - ERRORS * np.sqrt(share * (1.0 - share) / len(hit_R)))


def weigh(favour: int, against: int, of: int) -> Outcome:
    """Of cases that noise leaves open, most clearly one way and none clearly the other settle it; else partly."""
    if favour > of / 2 and not against:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if against > of / 2 and not favour else Outcome.PARTLY


def settle(difference_CR: Sequence[Array]) -> Outcome:
    """Verdict on cases with the same seeds; each has a difference per seed, positive where it favours the claim.

    The mean over cases must be clear, and no single case may clearly say the opposite; else partly.
    """
    pooled_R = np.mean(difference_CR, axis=0)
    if clearly_above(pooled_R) and not any(clearly_below(one_R) for one_R in difference_CR):
        return Outcome.REPRODUCED
    opposed = clearly_below(pooled_R) and not any(clearly_above(one_R) for one_R in difference_CR)
    return Outcome.DIFFERS if opposed else Outcome.PARTLY
