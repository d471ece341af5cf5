"""The tables of the cats study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megasharp.labs.cats.experiments import (
    BASES,
    CALIBRATIONS,
    GROUP_SIZE,
    GROUP_SIZES,
    LONG_STEPS,
    PLAIN,
    Result,
    Results,
    calibrated,
    long_setting,
    rows,
)
from megasharp.labs.cats.training import STEPS
from megasharp.labs.cats.world import DISTINCT_ESTIMATORS, ESTIMATORS, SHIFTS
from megasharp.labs.study import Cell, Table

_BY_GROUP_SIZE = ("estimator", "optimizer", "lr", *(f"G={g}" for g in GROUP_SIZES))


def tabulate(results: Results) -> tuple[Table, ...]:
    """All tables, in the order of the paper's section and appendices."""
    return (
        _by_group_size(
            "collapse_steps",
            f"median step of the collapse (one correct label > .95), of {STEPS}",
            results,
            lambda r: steps_cell(r.median_step),
        ),
        _by_group_size("dominance", "larger correct label's share at the end", results, lambda r: r.dominance),
        _long(results),
        _siamese(results),
        _calibration(results),
    )


def steps_cell(step: float) -> Cell:
    """A step, or "none"."""
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
