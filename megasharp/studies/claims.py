"""Verdicts on claims of the papers: from runs with seeds, which are noisy, and from random trials of a formula.

A difference is clear when the mean over seeds exceeds two standard errors; between two settings, when the mean of
their paired differences does. One seed shows no clear difference, and no verdict may depend on an unclear one. This
rule is ours: the papers give no errors. A `Check` counts the violations of one inequality or condition in random
trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megasharp.studies.softmax import Bools, Floats
from megasharp.studies.study import Cell, Claim, Outcome

ERRORS = 2.0


def outcome(holds: int, of: int) -> Outcome:
    """Return REPRODUCED where all cases hold, DIFFERS where none does, else PARTLY."""
    if holds == of:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if holds == 0 else Outcome.PARTLY


def standard_error(value_R: Floats) -> float:
    """Return the standard error of the mean over seeds; infinite for one seed."""
    return float(value_R.std(ddof=1) / np.sqrt(len(value_R))) if len(value_R) > 1 else float("inf")


def clearly_above(value_R: Floats, bound: float = 0.0) -> bool:
    """Return True where the mean over seeds is above `bound` by more than two standard errors."""
    return bool(value_R.mean() - bound > ERRORS * standard_error(value_R))


def clearly_below(value_R: Floats, bound: float = 0.0) -> bool:
    """Return True where the mean over seeds is below `bound` by more than two standard errors."""
    return clearly_above(-value_R, -bound)


def clearly_rarer(hit_R: Bools, share: float) -> bool:
    """Return True where the share of hits is below `share` by more than two binomial standard errors.

    The error is that of hits with probability `share`: seeds that all agree have no spread of their own.

    Example: of 20 seeds 17 are clearly rarer than 0.99 and not clearly rarer than 0.9.
    """
    return bool(hit_R.mean() < share - ERRORS * np.sqrt(share * (1.0 - share) / len(hit_R)))


def weigh(favour: int, against: int, of: int) -> Outcome:
    """Return a verdict where most cases are clear one way and none is clear the other way; else PARTLY."""
    if favour > of / 2 and not against:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if against > of / 2 and not favour else Outcome.PARTLY


def settle(difference_CR: Sequence[Floats]) -> Outcome:
    """Return the verdict on cases with the same seeds, from their differences per seed (positive for the claim).

    The mean over cases must be clear, and no single case may be clear the other way; else PARTLY.
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
        """The check as a row of the table with COLUMNS."""
        return (self.where, self.statement, self.trials, self.violations, "" if self.worst is None else self.worst)

    def claim(self, statement: str, paper: str) -> Claim:
        """Return the claim that the check always holds: REPRODUCED only where no trial violates it."""
        held = self.trials > 0 and self.violations == 0
        ours = f"{self.violations} violations in {self.trials} trials"
        if not held:
            ours += f" ({self.share:.1%})"
        return Claim(self.where, statement, paper, ours, Outcome.REPRODUCED if held else Outcome.DIFFERS)


def at_most(where: str, statement: str, value: Floats, bound: Floats) -> Check:
    """Check value <= bound, one trial per element."""
    excess = (value - bound) / np.maximum(1e-300, np.abs(value) + np.abs(bound))
    worst = float(excess.max()) if excess.size else float("nan")
    return Check(where, statement, excess.size, int((excess > TOLERANCE).sum()), worst)


def never(where: str, statement: str, wrong: Bools) -> Check:
    """Check that a condition is false in every trial."""
    return Check(where, statement, wrong.size, int(wrong.sum()), None)


def pooled(checks: Sequence[Check]) -> Check:
    """Add up the same check from several seeds."""
    first = checks[0]
    worsts = [check.worst for check in checks if check.worst is not None]
    return Check(
        first.where,
        first.statement,
        sum(check.trials for check in checks),
        sum(check.violations for check in checks),
        max(worsts, default=None),
    )
