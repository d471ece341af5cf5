"""Z and over-sharpening by the batch's accuracy p, sections 3.2 and 4.1 of 2601.15609: what sigma damps, IAC's effect.

Theorem 3.3's second bound is Z >= 1 + (sigma / beta) gap, sigma = sqrt(p (1 - p)). The paper says that sigma stabilises
updates from skewed batches and is not enough to counteract the suppression of unsampled modes. To see sigma, Z is also
computed with the advantages 1 / p and -1 / (1 - p), whose bound is 1 + gap / beta: normalised ones over sigma.

IAC multiplies the positive advantages by (1 - p)^alpha, "preventing excessive growth of Z". Each sampled correct mode's
exponent shrinks by it and no other changes, so that Z falls in any batch; the check is there to find an error of ours.
What it does to over-sharpening (Definition 3.1) is not obvious, since a smaller Z comes with smaller gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from megasharp.studies.bounds.sharpening import (
    Cases,
    batch_accuracy,
    batch_exponent,
    is_over_sharpened,
    normalised_advantages,
    random_cases,
    ratio_exponent,
)
from megasharp.studies.claims import Check, at_most, settle
from megasharp.studies.softmax import Bools, Counts, Floats, log_partition, tilt
from megasharp.studies.study import Cell, Claim, Outcome, Table

# Large enough for batches of accuracy 1/64 and 63/64.
GROUP = 64
TRIALS = 100_000
EDGES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 1.0)
ALPHA = 1.0


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Batches of one range of accuracy under one kind of advantages, Theorem 3.2's policy unless said otherwise.

    `suppressed`: share with Z > 1. `growth`: median log Z. `over`, `ratio_over`: share over-sharpened, the second one
    under the importance-ratio policy. `correct`: mean probability of the correct modes.
    """

    suppressed: float
    growth: float
    over: float
    ratio_over: float
    correct: float


@dataclass(frozen=True, slots=True)
class Bin:
    """`low` < p <= `high`. `sigma`: its mean; `confident`: share with gap > 0. `undamped`: advantages over sigma."""

    low: float
    high: float
    batches: int
    sigma: float
    confident: float
    plain: Outcomes
    undamped: Outcomes
    iac: Outcomes

    @property
    def damping(self) -> float:
        """Median log Z over the undamped one."""
        return self.plain.growth / self.undamped.growth


@dataclass(frozen=True, slots=True, eq=False)
class ByAccuracy:
    """All bins that hold batches, and the check that IAC never raises Z.

    `spared`: by policy (Theorem 3.2's, importance ratio) and batch, 1 where IAC avoids over-sharpening, -1 where it
    causes it, else 0.
    """

    bins: tuple[Bin, ...]
    lowers: Check
    spared: tuple[Floats, Floats]

    def overall(self, name: str) -> tuple[float, float]:
        """Return a mean of `Outcomes` over all batches, with advantages as they are and with IAC."""
        weight = [b.batches for b in self.bins]
        before = np.average([getattr(b.plain, name) for b in self.bins], weights=weight)
        after = np.average([getattr(b.iac, name) for b in self.bins], weights=weight)
        return float(before), float(after)


def calibrated(advantage_M: Floats, correct_M: Bools, accuracy: Floats, alpha: float) -> Floats:
    """IAC: advantages of correct modes times (1 - p)^alpha."""
    return np.where(correct_M, advantage_M * ((1.0 - accuracy) ** alpha)[..., None], advantage_M)


def undamped_advantages(correct_M: Bools, accuracy: Floats) -> Floats:
    """1 / p for correct modes and -1 / (1 - p) for others: the normalised advantages over sigma; 0 < p < 1."""
    return np.where(correct_M, 1.0 / accuracy[..., None], -1.0 / (1.0 - accuracy[..., None]))


def by_accuracy(rng: Generator, trials: int = TRIALS) -> ByAccuracy:
    """Draw batches of GROUP samples from random references; all-correct and all-incorrect ones are left out."""
    cases = random_cases(trials, rng)
    count_M = rng.multinomial(GROUP, cases.reference_M)
    accuracy = batch_accuracy(cases.correct_M, count_M)
    kept = (accuracy > 0) & (accuracy < 1)
    cases = Cases(*(getattr(cases, name)[kept] for name in Cases.__slots__))
    count_M, accuracy = count_M[kept], accuracy[kept]
    normalised_M = normalised_advantages(cases.correct_M, count_M)
    kinds = (
        normalised_M,
        undamped_advantages(cases.correct_M, accuracy),
        calibrated(normalised_M, cases.correct_M, accuracy, ALPHA),
    )
    measured = [_measure(cases, count_M, advantage_M) for advantage_M in kinds]
    sampled_share_M = count_M / GROUP
    likely = (sampled_share_M * cases.reference_M * cases.correct_M).sum(-1) / accuracy
    unlikely = (sampled_share_M * cases.reference_M * ~cases.correct_M).sum(-1) / (1.0 - accuracy)
    bins = []
    for low, high in pairwise(EDGES):
        own = (accuracy > low) & (accuracy <= high)
        if own.any():
            sigma = float(np.sqrt(accuracy * (1 - accuracy))[own].mean())
            confident = float((likely > unlikely)[own].mean())
            bins.append(Bin(low, high, int(own.sum()), sigma, confident, *(each.of(own) for each in measured)))
    lowers = at_most("sec 4.1", f"IAC alpha {ALPHA:g} lowers Z", measured[2].log_partition, measured[0].log_partition)
    plain, _, iac = measured
    spared = (_difference(plain.over, iac.over), _difference(plain.ratio_over, iac.ratio_over))
    return ByAccuracy(tuple(bins), lowers, spared)


def _difference(before: Bools, after: Bools) -> Floats:
    return before.astype(np.float64) - after.astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    log_partition: Floats
    over: Bools
    ratio_over: Bools
    correct: Floats

    def of(self, own: Bools) -> Outcomes:
        """Summarise the batches of `own`."""
        log_partition = self.log_partition[own]
        return Outcomes(
            suppressed=float((log_partition > 0).mean()),
            growth=float(np.median(log_partition)),
            over=float(self.over[own].mean()),
            ratio_over=float(self.ratio_over[own].mean()),
            correct=float(self.correct[own].mean()),
        )


def _measure(cases: Cases, count_M: Counts, advantage_M: Floats) -> _Measured:
    reference_M, correct_M = cases.reference_M, cases.correct_M
    exponent_M = batch_exponent(advantage_M, count_M, cases.beta)
    policy_M = tilt(reference_M, exponent_M)
    ratio_M = tilt(reference_M, ratio_exponent(reference_M, advantage_M, count_M, cases.beta))
    return _Measured(
        log_partition(reference_M, exponent_M),
        is_over_sharpened(policy_M, reference_M, correct_M),
        is_over_sharpened(ratio_M, reference_M, correct_M),
        (policy_M * correct_M).sum(-1),
    )


def accuracy_tables(found: ByAccuracy) -> tuple[Table, ...]:
    """Tabulate sigma's damping, and IAC, by accuracy."""
    damped: list[tuple[Cell, ...]] = [
        (_range(b), b.batches, b.sigma, b.confident, b.plain.suppressed, b.plain.growth, b.undamped.growth)
        for b in found.bins
    ]
    calibrated: list[tuple[Cell, ...]] = [
        (
            _range(b),
            *(b.plain.suppressed, b.iac.suppressed),
            *(b.plain.over, b.iac.over, b.plain.ratio_over, b.iac.ratio_over),
            *(b.plain.correct, b.iac.correct),
        )
        for b in found.bins
    ]
    return (
        Table(
            "skewed",
            f"Z by the batch's accuracy, G={GROUP}, normalised advantages",
            ("p", "batches", "sigma", "gap > 0", "Z > 1", "median log Z", "without sigma"),
            tuple(damped),
        ),
        Table(
            "iac",
            f"IAC alpha {ALPHA:g} by the batch's accuracy, G={GROUP}",
            (
                "p",
                "Z > 1",
                "Z > 1, IAC",
                "over-sharpened (3.2)",
                "the same, IAC",
                "over-sharpened (ratio)",
                "that, IAC",
                "correct (3.2)",
                "correct, IAC",
            ),
            tuple(calibrated),
        ),
    )


def _range(b: Bin) -> str:
    return f"{b.low:.3g} to {b.high:.3g}"


def accuracy_claims(found: ByAccuracy) -> tuple[Claim, ...]:
    """Judge sigma's damping, its insufficiency, and both promises of IAC."""
    return (_damps(found), _insufficient(found), _limits(found), _mitigates(found))


def _damps(found: ByAccuracy) -> Claim:
    middle = [b for b in found.bins if b.low >= 0.25 and b.high <= 0.75]
    skewed = found.bins[-1]
    usual = sum(b.damping for b in middle) / len(middle)
    ours = (
        f"median log Z for p above {skewed.low:.3g}: {skewed.plain.growth:.3f}, without sigma "
        f"{skewed.undamped.growth:.3f}; for p from .25 to .75 sigma leaves {usual:.0%} of it, here {skewed.damping:.0%}"
    )
    holds = 0.0 < skewed.damping < usual
    statement = "sigma damps Z in skewed batches (read as: of mostly correct samples)"
    return Claim("sec 3.2", statement, "vanishes as p tends to 1", ours, _if(holds))


def _insufficient(found: ByAccuracy) -> Claim:
    shares = [b.plain.suppressed for b in found.bins]
    ours = (
        "Z > 1 in "
        + ", ".join(f"{share:.0%}" for share in shares)
        + f" of batches, from p below {found.bins[0].high:.3g} to above {found.bins[-1].low:.3g}"
    )
    rises = all(later >= earlier for earlier, later in pairwise(shares))
    statement = "sigma is not enough: unsampled modes are suppressed once the model is confident"
    verdict = Outcome.REPRODUCED if rises and shares[-1] > 0.5 else _if(False, partly=shares[-1] > 0.5)
    return Claim("sec 3.2", statement, "insufficient", ours, verdict)


def _limits(found: ByAccuracy) -> Claim:
    middle = found.bins[len(found.bins) // 2]
    claim = found.lowers.claim("IAC limits the growth of Z", "prevents excessive growth")
    ours = (
        f"{claim.ours}; Z > 1 for p from {_range(middle)}: {middle.plain.suppressed:.0%}, with IAC "
        f"{middle.iac.suppressed:.0%}"
    )
    return Claim(claim.where, claim.statement, claim.paper, ours, claim.outcome)


def _mitigates(found: ByAccuracy) -> Claim:
    kept = [(found.overall("over"), "Theorem 3.2's policy"), (found.overall("ratio_over"), "importance ratio")]
    shown = ", ".join(f"{before:.0%} to {after:.0%} ({policy})" for (before, after), policy in kept)
    before, after = found.overall("correct")
    ours = f"over-sharpened batches: {shown}; probability of the correct modes {before:.3f} to {after:.3f}"
    return Claim("sec 4.1", "IAC mitigates over-sharpening", "mitigates", ours, settle(found.spared))


def _if(holds: bool, partly: bool = False) -> Outcome:
    return Outcome.REPRODUCED if holds else (Outcome.PARTLY if partly else Outcome.DIFFERS)
