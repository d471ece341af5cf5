"""Figures of a sweep's runs on the suites of its table: each metric problem by problem, and means of the suites'."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasharp.common.errors import UserError
from megasharp.evals.estimators import columns_of, means
from megasharp.evals.result import EvalResult
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import RunHistory
from megasharp.reporting.sweeps.grid import Cell, SweepConfig

# The mean of pass@k over all k that were measured: one number where a method has to be chosen by all of them.
MEAN = "pass@k mean"
PASS = re.compile(r"pass@\d+")

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's evaluation after `step`, and the number of tokens it had sampled by then.

    `figures` are [problems] each, as `evals.columns` has them and `MEAN`; NaN where a problem has none. Problems are
    listed suite by suite, and `sizes` are the suites' numbers of them: a metric is the average of the suites' means.
    """

    seed: int
    step: int
    tokens: int
    problems: tuple[str, ...]
    figures: Mapping[str, Values]
    sizes: tuple[int, ...]

    def means(self) -> dict[str, float]:
        """Return the average of every metric."""
        return means(self.figures, self.sizes)


def measure(history: RunHistory, suites: Sequence[str], seed: int, *, first: bool = False) -> Measured:
    """Read a run's last evaluation on `suites`, or with `first` the one before its first step.

    Metrics that not all suites have are left out. Raises UserError where a suite has no evaluation.
    """
    step = 0 if first else history.last_step
    results = []
    for suite in suites:
        path = history.folder / "evals" / f"step_{step:06d}" / f"{suite}.json"
        if not path.is_file():
            when = "before the first step (eval.at_start)" if first else f"after step {step}"
            raise UserError(f"{history.folder}: no evaluation on {suite} {when}")
        results.append(load_result(path))
    tables = [_figures(result) for result in results]
    return Measured(
        seed,
        step,
        0 if first else history.tokens,
        tuple(row.id for result in results for row in result.rows),
        {
            name: np.concatenate([table[name] for table in tables])
            for name in tables[0]
            if all(name in table for table in tables)
        },
        tuple(len(result.rows) for result in results),
    )


def _figures(result: EvalResult) -> dict[str, Values]:
    ks = sorted(result.pass_at_k)
    found = columns_of(result.rows, ks, result.seed, tuple(row.id for row in result.rows))
    return {**found, MEAN: np.mean([found[f"pass@{k}"] for k in ks], axis=0)}


def measured_rows(
    config: SweepConfig, histories: Mapping[Cell, RunHistory], suites: Sequence[str]
) -> dict[str, list[Measured]]:
    """Measure the runs by row, in the sweep's order; the model before training comes first.

    Raises UserError where a run was not measured at each k that the table shows.
    """
    found: dict[str, list[Measured]] = {}
    before = config.results.before
    if before is not None:
        found[before_row(config)] = [
            measure(run, suites, cell.seed, first=True) for cell, run in histories.items() if cell.case == before
        ]
    for cell, run in histories.items():
        found.setdefault(cell.row, []).append(measure(run, suites, cell.seed))
    for one in (one for runs in found.values() for one in runs):
        known = sorted(int(name.removeprefix("pass@")) for name in one.figures if PASS.fullmatch(name))
        missing = [str(k) for k in config.results.k if k not in known]
        if missing:
            raise UserError(
                f"{config.name}: results.k: {', '.join(missing)} was not measured (eval.k); there is "
                f"{', '.join(map(str, known))}"
            )
    return found


def before_row(config: SweepConfig) -> str:
    """Return the name of the row of the model before training; empty where the table has none."""
    return "base" if config.results.before is not None else ""


def suites_of(config: SweepConfig, history: RunHistory) -> tuple[str, ...]:
    """Return the suites of the sweep's table: those that it names, or the only one of a run."""
    if config.results.suites:
        return config.results.suites
    suites = sorted({path.stem for path in (history.folder / "evals").glob("step_*/*.json")})
    if len(suites) != 1:
        raise UserError(f"results.suite: say which; {history.folder} was evaluated on {', '.join(suites) or 'none'}")
    return tuple(suites)
