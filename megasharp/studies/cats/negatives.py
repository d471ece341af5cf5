"""Wrong samples calibrated too, which 2601.15609 section 4.1 advises against: trainings, table and claims.

IAC weighs correct samples by (1 - p)^alpha. Here wrong samples get the same factor, or p^-alpha, and, for the idealised
weights 1 / pi, correct samples alone or all of them have it. The cats have no partly right samples, the paper's reason;
the study `tree` has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.cats.experiments import (
    ADAMW,
    CORRECT,
    GROUP_SIZE,
    PLAIN,
    Setting,
    Trajectory,
    measure,
    train,
)
from megasharp.studies.claims import clearly_above, outcome, settle
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Cell, Claim, Table

# With raw rewards wrong samples weigh nothing.
BASES: Mapping[str, Setting] = {
    "SGD, normalised": replace(PLAIN, estimator="normalised"),
    "SGD, mean-shifted": replace(PLAIN, estimator="mean-shifted"),
    "AdamW .1, normalised": replace(ADAMW, estimator="normalised"),
}
NONE, IAC, SAME, INVERSE, CORRECT_ONLY, ALL = (
    "none",
    "IAC alpha 1",
    "IAC, wrong samples (1 - p) too",
    "IAC, wrong samples 1 / p",
    "correct / pi",
    "all / pi",
)
VARIANTS: Mapping[str, Setting] = {
    NONE: PLAIN,
    IAC: replace(PLAIN, alpha=1.0),
    SAME: replace(PLAIN, alpha=1.0, reweighing="wrong too"),
    INVERSE: replace(PLAIN, alpha=1.0, reweighing="wrong up"),
    CORRECT_ONLY: replace(PLAIN, reweighing="correct / pi"),
    ALL: replace(PLAIN, reweighing="all / pi"),
}
EARLY = 20
# A correct label is lost below this share of both.
LOST = 0.001
# Accuracy has fallen from this much on.
FALL = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """Per seed: dominance at the end, the largest fall of accuracy from its peak, accuracy after EARLY steps.

    `jump_R`: the largest change of the policy in one step, total variation.
    """

    dominance_R: Floats
    fall_R: Floats
    early_R: Floats
    jump_R: Floats

    @property
    def lost(self) -> float:
        """Share of seeds in which one correct label is gone at the end."""
        return float((self.dominance_R > 1.0 - LOST).mean())


Effects = Mapping[tuple[str, str], Effect]


def run_negatives(seeds: Sequence[int]) -> Effects:
    """Train every variant under every base: effects by (base, variant)."""
    return {
        (base, variant): effect(train(replace(how, reweighing=what.reweighing, alpha=what.alpha), seeds))
        for base, how in BASES.items()
        for variant, what in VARIANTS.items()
    }


def effect(trajectory: Trajectory) -> Effect:
    """Measure one training."""
    accuracy_RT = trajectory.policy_RTV[:, :, list(CORRECT)].sum(axis=-1)
    peak_RT = np.maximum.accumulate(accuracy_RT, axis=1)
    return Effect(
        dominance_R=measure(trajectory).dominance_RT[:, -1],
        fall_R=(peak_RT - accuracy_RT).max(axis=1),
        early_R=accuracy_RT[:, EARLY],
        jump_R=np.abs(np.diff(trajectory.policy_RTV, axis=1)).sum(axis=-1).max(axis=1) / 2.0,
    )


def negatives_table(effects: Effects) -> Table:
    """Tabulate means over seeds."""
    lines: tuple[tuple[Cell, ...], ...] = tuple(
        (
            base,
            variant,
            *(float(x_R.mean()) for x_R in (e.dominance_R, e.early_R, e.fall_R, e.jump_R)),
            e.lost,
        )
        for (base, variant), e in effects.items()
    )
    columns = (
        "under",
        "advantages",
        "dominance",
        f"accuracy, step {EARLY}",
        "its largest fall",
        "largest step",
        "seeds with a label lost",
    )
    return Table("negatives", f"wrong samples calibrated too, G={GROUP_SIZE}", columns, lines)


def negatives_claims(effects: Effects) -> tuple[Claim, ...]:
    """Judge both parts of section 4.1's advice: amplifying wrong samples, and leaving them as they are."""
    return (_accuracy(effects), _amplified(effects), _left(effects))


def _accuracy(effects: Effects) -> Claim:
    fallen = sum(clearly_above(effects[base, ALL].fall_R, FALL) for base in BASES)
    shown = "; ".join(f"{base} {effects[base, ALL].fall_R.mean():.4f}" for base in BASES)
    statement = "amplified negative advantages destabilise training (read as: accuracy falls)"
    ours = f"largest fall of accuracy with 1 / pi on all samples: {shown}"
    return Claim("4.1", statement, "destabilises", ours, outcome(fallen, len(BASES)))


def _amplified(effects: Effects) -> Claim:
    pairs = [(base, effects[base, CORRECT_ONLY], effects[base, ALL]) for base in BASES]
    shown = [
        f"{base} {correct.dominance_R.mean():.2f} to {everything.dominance_R.mean():.2f} (a label lost in "
        f"{everything.lost:.0%})"
        for base, correct, everything in pairs
    ]
    return Claim(
        "4.1",
        "amplified negative advantages destabilise training (read as: correct labels are lost)",
        "destroys useful structure",
        f"dominance with 1 / pi on correct samples, then on all: {'; '.join(shown)}",
        settle([everything.dominance_R - correct.dominance_R for _, correct, everything in pairs]),
    )


def _left(effects: Effects) -> Claim:
    pairs = [(base, effects[base, IAC], effects[base, SAME]) for base in BASES]
    shown = [
        f"{base} {iac.dominance_R.mean():.2f} to {same.dominance_R.mean():.2f}, accuracy at step {EARLY} "
        f"{iac.early_R.mean():.2f} to {same.early_R.mean():.2f}"
        for base, iac, same in pairs
    ]
    return Claim(
        "4.1",
        "IAC keeps more of both labels by leaving wrong samples as they are",
        "leave negative ones untouched",
        f"dominance under IAC, then with (1 - p) on wrong samples too: {'; '.join(shown)}",
        settle([same.dominance_R - iac.dominance_R for _, iac, same in pairs]),
    )
