"""What a set of random trials of one inequality or identity comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasharp.labs.study import Cell, Claim, Outcome

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
