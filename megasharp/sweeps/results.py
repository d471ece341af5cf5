"""What a sweep's finished runs found: each row's figures over its seeds, with intervals, and beside one other row.

Two things vary. Which problems a suite has and which samples were drawn: 95% intervals, by resampling problems, each
with its mean over the row's runs. And how a run went: the lowest and the highest run stand beside the mean, because
three runs are too few for an interval of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megasharp.errors import UserError
from megasharp.evals.bootstrap import Interval, mean_intervals
from megasharp.evals.columns import columns
from megasharp.evals.files import load_result
from megasharp.runs.history import RunHistory

# The mean of pass@k over all k that were measured: one number where a method has to be chosen by all of them.
MEAN = "pass@k mean"
_RESAMPLING_SEED = 1

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's evaluation after `step`, and how many tokens it had sampled by then.

    `figures` are [problems] each, as `evals.columns` has them and `MEAN`; NaN where a problem has none.
    """

    seed: int
    step: int
    tokens: int
    problems: tuple[str, ...]
    figures: Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure's mean over runs, its interval over problems, and the lowest and the highest run."""

    mean: float
    interval: Interval
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: estimates by the figures' names.

    `difference` is this row's figure minus that of the row it stands beside, problem by problem, of the same seeds;
    empty where there is none.
    """

    name: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]


def measure(history: RunHistory, suite: str, seed: int, *, first: bool = False) -> Measured:
    """A run's last evaluation on `suite`, or with `first` the one before its first step.

    Raises UserError where it has none.
    """
    step = 0 if first else history.last_step
    path = history.folder / "evals" / f"step_{step:06d}" / f"{suite}.json"
    if not path.is_file():
        when = "before the first step (eval.at_start)" if first else f"after step {step}"
        raise UserError(f"{history.folder}: no evaluation on {suite} {when}")
    result = load_result(path)
    ks = sorted(result.pass_at_k)
    kept = [row for row in result.rows if row.samples >= max(ks)]
    found = columns(kept, ks, result.seed)
    found[MEAN] = np.mean([found[f"pass@{k}"] for k in ks], axis=0)
    problems = tuple(row.id for row in result.rows)
    places = [problems.index(row.id) for row in kept]
    figures = {name: _placed(values, places, len(problems)) for name, values in found.items()}
    return Measured(seed, step, 0 if first else history.tokens, problems, figures)


def _placed(values: Values, places: Sequence[int], problems: int) -> Values:
    """NaN for problems that were left out."""
    whole = np.full(problems, np.nan)
    whole[places] = values
    return whole


def rows(measured: Mapping[str, Sequence[Measured]], against: str | None) -> list[Row]:
    """The table's rows, in order, with their differences from the row `against`.

    Raises UserError where runs were not measured on the same problems.
    """
    every = [one for runs in measured.values() for one in runs]
    if any(one.problems != every[0].problems for one in every):
        raise UserError("the sweep's runs were evaluated on different problems: run those anew that differ")
    other = {one.seed: one.figures for one in measured.get(against, ())} if against is not None else {}
    return [_row(name, runs, {} if name == against else other) for name, runs in measured.items() if runs]


def _row(name: str, runs: Sequence[Measured], other: Mapping[int, Mapping[str, Values]]) -> Row:
    pairs = [(one.figures, other[one.seed]) for one in runs if one.seed in other]
    figures = {figure: [one.figures[figure] for one in runs if figure in one.figures] for figure in runs[0].figures}
    differences = {
        figure: [own[figure] - beside[figure] for own, beside in pairs if figure in own and figure in beside]
        for figure in figures
    }
    return Row(name, tuple(one.seed for one in runs), _estimates(figures), _estimates(differences))


def _estimates(figures: Mapping[str, Sequence[Values]]) -> dict[str, Estimate]:
    """Of figures by name, [problems] of each run; those that no run has are left out."""
    known = {name: np.stack(values) for name, values in figures.items() if values}
    if not known:
        return {}
    pooled_PF = np.stack([_mean(values_RP, axis=0) for values_RP in known.values()], axis=1)
    found = {}
    for (name, values_RP), interval in zip(
        known.items(), mean_intervals(pooled_PF, seed=_RESAMPLING_SEED), strict=True
    ):
        if interval is not None:
            runs = _mean(values_RP, axis=1)
            found[name] = Estimate(float(_mean(runs, axis=0)), interval, float(np.min(runs)), float(np.max(runs)))
    return found


def _mean(values: Values, axis: int) -> Values:
    """The mean of what is known; NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.asarray(np.where(known, values, 0.0).sum(axis=axis))
    mean: Values = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return mean
