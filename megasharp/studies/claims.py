"""Verdicts on noisy runs: what counts as a difference, and what a handful of settings adds up to.

A difference is clear when the seeds' mean exceeds two standard errors; of two settings, that of their paired
differences. One seed shows no clear difference, and no verdict may turn on an unclear one. Ours: the papers give no
errors.

What a set of random trials of one inequality or identity comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasharp.studies.softmax import Array, Bools
from megasharp.studies.study import Cell, Claim, Outcome

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


# Violations smaller than this, relative to the sides compared, are rounding.
TOLERANCE = 1e-9
COLUMNS = ("where", "statement", "trials", "violations", "worst excess")


@dataclass(frozen=True, slots=True)
class Check:
    """`worst` is the largest (value - bound) / (|value| + |bound|); None for a condition that is not an inequality."""

    where: str
    statement: str
    trials: int
    violations: int
    worst: float | None

    @property
    def share(self) -> float:
        """Violations per trial; NaN without trials."""
        return self.violations / self.trials if self.trials else float("nan")

    @property
    def row(self) -> tuple[Cell, ...]:
        """A row under COLUMNS."""
        return (self.where, self.statement, self.trials, self.violations, "" if self.worst is None else self.worst)

    def claim(self, statement: str, paper: str) -> Claim:
        """The claim that it always holds: reproduced only where no trial violates it."""
        held = self.trials > 0 and self.violations == 0
        ours = f"{self.violations} violations in {self.trials} trials"
        if not held:
            ours += f" ({self.share:.1%})"
        return Claim(self.where, statement, paper, ours, Outcome.REPRODUCED if held else Outcome.DIFFERS)


def at_most(where: str, statement: str, value: NDArray[np.float64], bound: NDArray[np.float64]) -> Check:
    """Check value <= bound, one trial per element."""
    excess = (value - bound) / np.maximum(1e-300, np.abs(value) + np.abs(bound))
    worst = float(excess.max()) if excess.size else float("nan")
    return Check(where, statement, excess.size, int((excess > TOLERANCE).sum()), worst)


def never(where: str, statement: str, wrong: NDArray[np.bool_]) -> Check:
    """Check that a condition is false in every trial."""
    return Check(where, statement, wrong.size, int(wrong.sum()), None)


def pooled(checks: Sequence[Check]) -> Check:
    """The same check from several seeds as one."""
    first = checks[0]
    worsts = [check.worst for check in checks if check.worst is not None]
    return Check(
        first.where,
        first.statement,
        sum(check.trials for check in checks),
        sum(check.violations for check in checks),
        max(worsts, default=None),
    )
