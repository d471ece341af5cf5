"""Experiments of the cats study: the settings that are trained, the result of each, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.cats.training import (
    ADAMW_LR,
    CAT,
    CORRECT,
    DISTINCT_ESTIMATORS,
    ESTIMATORS,
    LR,
    PERSIAN,
    SHIFTS,
    SIAMESE,
    STEPS,
    Setting,
    Trajectory,
    train,
)
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Cell, Table

GROUP_SIZES = (2, 4, 8, 16, 32)
GROUP_SIZE = 8
LONG_STEPS = 5000
# Collapse: one of the two correct labels holds more than this.
COLLAPSED = 0.95

# One row of the big table each: optimizer and learning rate. The first is the main one.
OPTIMIZERS = (
    Setting(optimizer="SGD", lr=LR),
    Setting(optimizer="SGD", lr=0.1),
    Setting(optimizer="SGD", lr=2.0),
    Setting(optimizer="momentum", lr=LR),
    Setting(optimizer="AdamW", lr=LR),
    Setting(optimizer="AdamW", lr=ADAMW_LR),
)
PLAIN, _, _, MOMENTUM, FAST_ADAMW, ADAMW = OPTIMIZERS

_IAC = replace(PLAIN, alpha=1.0)
CALIBRATIONS: Mapping[str, Setting] = {
    "none": PLAIN,
    "IAC alpha .5": replace(PLAIN, alpha=0.5),
    "IAC alpha 1": _IAC,
    "IAC alpha 2": replace(PLAIN, alpha=2.0),
    "IAC alpha 1, literal": replace(_IAC, iac_form="literal"),
    "DLC mu .25": replace(PLAIN, mu=0.25),
    "DLC mu .5": replace(PLAIN, mu=0.5),
    "DLC mu 1": replace(PLAIN, mu=1.0),
    "DLC mu .5, memory lr 2": replace(PLAIN, mu=0.5, memory_lr=2.0),
    "DLC mu .5, pi/sampler up to 2": replace(PLAIN, mu=0.5, importance_cap=2.0),
    "IAC alpha 1 + DLC mu .25": replace(_IAC, mu=0.25),
    "IAC alpha 1 + DLC mu .5": replace(_IAC, mu=0.5),
    "IAC alpha 1 + DLC mu 1": replace(_IAC, mu=1.0),
}
# Under what the calibrations are tried: estimator, optimizer and learning rate.
BASES: Mapping[str, Setting] = {
    "SGD, raw": PLAIN,
    "SGD, normalised": replace(PLAIN, estimator="normalised"),
    "AdamW .1, raw": ADAMW,
    "AdamW .1, normalised": replace(ADAMW, estimator="normalised"),
    "AdamW .5, raw": FAST_ADAMW,
}


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """`collapse_step_R`: first step past COLLAPSED, infinite where there is none. `dominance_RT`: the larger of the two
    correct labels' share of both. `cat_wins_R`: 1 for seeds that end on Cat. `siamese_R`: probability of Siamese on the
    held-out input after training, by similarity.
    """

    collapse_step_R: Floats
    dominance_RT: Floats
    cat_wins_R: Floats
    siamese_R: Mapping[str, Floats]

    @property
    def siamese(self) -> Mapping[str, float]:
        """Mean over seeds of `siamese_R`."""
        return {name: float(p_R.mean()) for name, p_R in self.siamese_R.items()}

    @property
    def mean_dominance_R(self) -> Floats:
        """Mean over the steps: how early and how far a seed collapsed, in one number."""
        return np.asarray(self.dominance_RT.mean(axis=1))

    @property
    def late_rise_R(self) -> Floats:
        """Change of dominance over the second half of the steps."""
        return np.asarray(self.dominance_RT[:, -1] - self.dominance_RT[:, self.dominance_RT.shape[1] // 2])

    @property
    def median_step(self) -> float:
        """Median first step past COLLAPSED; infinite where half of the seeds or more never are."""
        return float(np.sort(self.collapse_step_R)[len(self.collapse_step_R) // 2])

    @property
    def collapsed(self) -> float:
        """Share of seeds that were past COLLAPSED at some step."""
        return float(np.isfinite(self.collapse_step_R).mean())

    @property
    def dominance(self) -> float:
        """Mean over seeds at the end; 0.5 is even, 1 is collapse."""
        return float(self.dominance_RT[:, -1].mean())

    @property
    def dominance_halfway(self) -> float:
        """Mean over seeds after half of the steps."""
        return float(self.dominance_RT[:, self.dominance_RT.shape[1] // 2].mean())


Results = Mapping[Setting, Result]


def calibrated(base: Setting, calibration: Setting) -> Setting:
    """Combine `base`'s estimator and optimizer with `calibration`'s IAC and DLC."""
    return replace(calibration, estimator=base.estimator, optimizer=base.optimizer, lr=base.lr)


def long_setting(setting: Setting) -> Setting:
    """Return the same setting, trained for ten times as long."""
    return replace(setting, steps=LONG_STEPS)


def rows() -> Iterator[Setting]:
    """List estimators under every optimizer; RF++-baseline under the first only, where it equals `normalised`."""
    for optimizer in OPTIMIZERS:
        for estimator in ESTIMATORS if optimizer is PLAIN else DISTINCT_ESTIMATORS:
            yield replace(optimizer, estimator=estimator)


def settings() -> Iterator[Setting]:
    """List every setting of the study; some come twice."""
    for row in rows():
        yield from (replace(row, group_size=group_size) for group_size in GROUP_SIZES)
    for estimator in ESTIMATORS:
        yield long_setting(replace(PLAIN, estimator=estimator))
    for base in BASES.values():
        for calibration in CALIBRATIONS.values():
            yield calibrated(base, calibration)


def run_all(seeds: Sequence[int]) -> Results:
    """Train every setting once, for all seeds."""
    return {setting: measure(train(setting, seeds)) for setting in dict.fromkeys(settings())}


def measure(trajectory: Trajectory) -> Result:
    """Return the result of a training."""
    correct_RTV = trajectory.policy_RTV[:, :, list(CORRECT)]
    larger_RT = correct_RTV.max(axis=-1)
    past_RT = larger_RT > COLLAPSED
    collapse_step_R = np.where(past_RT.any(axis=1), past_RT.argmax(axis=1), np.inf)
    end_RV = trajectory.policy_RTV[:, -1]
    return Result(
        collapse_step_R=collapse_step_R,
        dominance_RT=larger_RT / correct_RTV.sum(axis=-1),
        cat_wins_R=(end_RV[:, CAT] > end_RV[:, PERSIAN]).astype(np.float64),
        siamese_R={name: trajectory.held_out(shift)[:, SIAMESE] for name, shift in SHIFTS.items()},
    )


_BY_GROUP_SIZE = ("estimator", "optimizer", "lr", *(f"G={g}" for g in GROUP_SIZES))


def tabulate(results: Results) -> tuple[Table, ...]:
    """Make all tables, in the order of the paper's section and appendices."""
    return (
        _by_group_size(
            "collapse_steps",
            f"median step of the collapse (one correct label > .95), of {STEPS}",
            results,
            lambda r: steps_cell(r.median_step),
        ),
        _by_group_size("dominance", "larger correct label's share at the end", results, lambda r: r.dominance),
        *(table(results) for table in (_long, _siamese, _calibration)),
    )


def steps_cell(step: float) -> Cell:
    """Return the step, or "none" for an infinite one."""
    return int(step) if np.isfinite(step) else "none"


def _by_group_size(name: str, title: str, results: Results, cell: Callable[[Result], Cell]) -> Table:
    lines = (
        (row.estimator, row.optimizer, row.lr, *(cell(results[replace(row, group_size=g)]) for g in GROUP_SIZES))
        for row in rows()
    )
    return Table(name, title, _BY_GROUP_SIZE, tuple(lines))


def _long(results: Results) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for estimator in ESTIMATORS:
        short = replace(PLAIN, estimator=estimator)
        brief, lasting = results[short], results[long_setting(short)]
        lines.append((estimator, brief.collapsed, lasting.collapsed, brief.dominance, lasting.dominance))
    columns = (
        "estimator",
        *(f"{what}, {n} steps" for what in ("collapsed seeds", "dominance") for n in (STEPS, LONG_STEPS)),
    )
    return Table("long", f"ten times as long: SGD, G={GROUP_SIZE}", columns, tuple(lines))


def _siamese(results: Results) -> Table:
    lines: tuple[tuple[Cell, ...], ...] = tuple(
        (estimator, g, *(results[replace(PLAIN, estimator=estimator, group_size=g)].siamese[s] for s in SHIFTS))
        for estimator in DISTINCT_ESTIMATORS
        for g in GROUP_SIZES
    )
    title = "probability of Siamese on the held-out Siamese input after training, by similarity (.25 before)"
    return Table("siamese", title, ("estimator", "G", *SHIFTS), lines)


def _calibration(results: Results) -> Table:
    lines: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(results[calibrated(base, calibration)].dominance for base in BASES.values()))
        for name, calibration in CALIBRATIONS.items()
    )
    title = f"IAC and DLC, G={GROUP_SIZE}: larger correct label's share at the end (.5 even, 1 collapse)"
    return Table("calibration", title, ("calibration", *BASES), lines)
