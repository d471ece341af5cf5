"""Results of a sweep's finished runs: each row's metrics over its seeds, and minus another row's; table and pictures.

In reading order: a row's estimates, and what `megasharp sweep --results` writes of them. Two things vary. The problems
of a suite and the samples drawn give a row's means 95% intervals, by resampling problems, each with its mean over the
row's runs; the lowest and the highest run are beside them. Differences between rows are of methods, so their intervals
are over runs and problems, and those alone decide what is bold (`evals.crossed`). Of several suites the means are
averaged, as the papers' tables do, and problems vary suite by suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megasharp.common.errors import UserError
from megasharp.common.files import completed, write_text
from megasharp.evals.crossed import Crossed, bold, crossed, places_by_seed
from megasharp.evals.estimators import Interval, average_intervals, by_suite, mean_over_runs, means
from megasharp.evals.frontier import Distance
from megasharp.reporting.history import read_run
from megasharp.reporting.passk import Banded, plot_frontier, plot_panels
from megasharp.reporting.sweeps.grid import Cell, SweepConfig
from megasharp.reporting.sweeps.line import MATCHED, above_line
from megasharp.reporting.sweeps.measured import MEAN, PASS, Measured, before_row, measured_rows, suites_of

_RESAMPLING_SEED = 1

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric's mean over runs, its interval over problems, and the lowest and the highest run."""

    mean: float
    interval: Interval
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A row's metric minus that of the row it is compared with, problem by problem.

    `crossed` is None where one of them has a single run. Then `interval` is over problems alone: of these two models,
    not of the methods that trained them.
    """

    mean: float
    interval: Interval
    crossed: Crossed | None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: estimates by the metrics' names.

    `difference` is empty where there is nothing to compare the row with. `compared` says of which runs it is, such as
    "3 pairs" or "2 and 5".
    """

    name: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Estimate]
    difference: Mapping[str, Difference]
    compared: str = ""


def rows(measured: Mapping[str, Sequence[Measured]], against: str | None) -> list[Row]:
    """Make the table's rows, in order, with their differences from the row `against`.

    Raises UserError where runs were not measured on the same problems.
    """
    every = [one for runs in measured.values() for one in runs]
    if any((one.problems, one.sizes) != (every[0].problems, every[0].sizes) for one in every):
        raise UserError("the sweep's runs were evaluated on different problems: run again those that differ")
    other = measured.get(against, ()) if against is not None else ()
    found = []
    for name, runs in measured.items():
        if not runs:
            continue
        figures = {figure: [one.figures[figure] for one in runs if figure in one.figures] for figure in runs[0].figures}
        sides = _sides(runs, other) if other and name != against else None
        found.append(
            Row(
                name,
                tuple(one.seed for one in runs),
                _estimates(figures, runs[0].sizes),
                _differences(sides) if sides else {},
                sides.text if sides else "",
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Sides:
    """The runs of both rows that are compared; with `paired` equally many, run by run of one seed."""

    own: Sequence[Measured]
    other: Sequence[Measured]
    paired: bool

    @property
    def text(self) -> str:
        if self.paired:
            return f"{len(self.own)} pairs" if len(self.own) > 1 else "1 pair"
        return f"{len(self.own)} and {len(self.other)}"


def _sides(own: Sequence[Measured], other: Sequence[Measured]) -> _Sides:
    """Pair runs by seed where both rows have the same seeds; else take all runs, as independent ones.

    Runs of one seed see the same data, and samples are drawn by the same numbers: they may be correlated.
    """
    places = places_by_seed([one.seed for one in own], [one.seed for one in other])
    return _Sides(own, other, False) if places is None else _Sides(own, [other[place] for place in places], True)


def _differences(sides: _Sides) -> dict[str, Difference]:
    """Compare metrics by name; those that not all of the runs have are left out."""
    every = [*sides.own, *sides.other]
    names = [name for name in sides.own[0].figures if all(name in one.figures for one in every)]
    values = {
        name: tuple(np.stack([one.figures[name] for one in side]) for side in (sides.other, sides.own))
        for name in names
    }
    over_problems = {name: mean_over_runs(after) - mean_over_runs(before) for name, (before, after) in values.items()}
    sizes = sides.own[0].sizes
    found = {}
    for name, interval in _intervals(over_problems, sizes).items():
        one = crossed(*values[name], paired=sides.paired, sizes=sizes)
        mean = means({name: over_problems[name]}, sizes)[name] if one is None else float(one.difference)
        found[name] = Difference(mean, interval, one)
    return found


def _estimates(figures: Mapping[str, Sequence[Values]], sizes: Sequence[int]) -> dict[str, Estimate]:
    """Estimate metrics by name, [problems] of each run; those that no run has are left out."""
    known = {name: np.stack(values) for name, values in figures.items() if values}
    found = {}
    for name, interval in _intervals({name: mean_over_runs(each) for name, each in known.items()}, sizes).items():
        runs = np.mean([mean_over_runs(part_RP.T) for part_RP in by_suite(known[name], sizes)], axis=0)
        found[name] = Estimate(float(np.nanmean(runs)), interval, float(np.min(runs)), float(np.max(runs)))
    return found


def _intervals(columns: Mapping[str, Values], sizes: Sequence[int]) -> dict[str, Interval]:
    """Resample the problems of metrics [problems], suite by suite; a metric that a suite lacks is left out."""
    if not columns:
        return {}
    suites = zip(*(by_suite(column_P, sizes) for column_P in columns.values()), strict=True)
    bounds = average_intervals([np.stack(suite, axis=1) for suite in suites], seed=_RESAMPLING_SEED)
    return {name: interval for name, interval in zip(columns, bounds, strict=True) if interval is not None}


# Metrics beside pass@k where they were measured, and their headings.
_BESIDE = {
    "distinct_correct": "distinct correct",
    "token_entropy": "token entropy",
    **{f"lambda_{n}": f"Lambda({n})" for n in (1, 2, 3)},
}


def markdown(rows: Sequence[Row], ks: Sequence[int], against: str | None) -> str:
    """Format the table: metrics with intervals over problems, below them the lowest and highest run; then differences.

    A difference is bold where its crossed interval excludes zero after Holm's correction over the rows of its column.
    """
    shown = [*(f"pass@{k}" for k in ks), MEAN, *(name for name in _BESIDE if any(name in row.figures for row in rows))]
    heads = [_BESIDE.get(name, name) for name in shown]
    cells = []
    for row in rows:
        estimates = []
        for found in (row.figures.get(name) for name in shown):
            text = f"{found.mean:.3f} [{found.interval.low:.3f}, {found.interval.high:.3f}]" if found else ""
            several = f"<br>{found.lowest:.3f} to {found.highest:.3f}" if found and len(row.seeds) > 1 else ""
            estimates.append(text + several)
        cells.append([f"`{row.name}`", str(len(row.seeds)), *estimates])
    lines = [*_lines(["", "runs", *heads], cells)]
    beside = [row for row in rows if row.difference]
    if beside:
        columns = [_column([row.difference.get(name) for row in beside]) for name in shown]
        cells = [[f"`{row.name}`", row.compared, *texts] for row, *texts in zip(beside, *columns, strict=True)]
        alone = [f"`{row.name}`" for row in beside if any(each.crossed is None for each in row.difference.values())]
        text = f"Minus `{against}`, problem by problem. {_EXPLANATION}"
        if alone:
            text += (
                f" One run on a side, {', '.join(alone)}: the interval is over problems alone, of these models; never "
                "bold."
            )
        lines += ["", text, ""]
        lines += _lines(["", "runs", *heads], cells)
    return "\n".join(lines) + "\n"


_EXPLANATION = (
    "First brackets: 95% interval over runs and problems, of that row alone; second: 95% t interval over runs. Bold: "
    "the first excludes zero after Holm's correction over the rows of its column too. Pairs are runs of one seed, "
    "where there are three or more."
)


def _column(column: Sequence[Difference | None]) -> list[str]:
    """Format the differences of one metric, which are the rows that Holm's correction counts."""
    marked = bold([None if each is None or each.crossed is None else float(each.crossed.p_value()) for each in column])
    texts: list[str] = []
    for each, mark in zip(column, marked, strict=True):
        if each is None or each.crossed is None:
            texts.append("" if each is None else f"{each.mean:+.3f} {_bounds(each.interval)}")
        else:
            text = f"{each.mean:+.3f} {_bounds(each.crossed.interval())}"
            texts.append(f"{f'**{text}**' if mark else text}<br>{_bounds(each.crossed.over_runs())}")
    return texts


def line_markdown(measured: Mapping[str, Sequence[Measured]], line: Sequence[str], ks: Sequence[int]) -> str:
    """Format the table of distances from the line that rows draw, a column for each k above 1; empty without rows."""
    rows = {name: {one.seed: one.figures for one in runs} for name, runs in measured.items()}
    sizes = next((one.sizes for runs in measured.values() for one in runs), ())
    columns = {name: above_line(rows, line, name, sizes) for name in (f"pass@{k}" for k in ks) if name != MATCHED}
    if not columns or not all(columns.values()):
        return ""
    first = next(iter(columns.values()))
    texts = [_distances([each for _, each in column.values()]) for column in columns.values()]
    cells = [[f"`{name}`", str(seeds), *own] for (name, (seeds, _)), *own in zip(first.items(), *texts, strict=True)]
    text = (
        f"At equal pass@1: above the line of {', '.join(f'`{name}`' for name in line)}. Brackets: 95% interval over "
        "runs and problems. Bold: it excludes zero after Holm's correction over the rows of its column too. Below: the "
        "ends of the line's piece at its pass@1. Empty: pass@1 is below the line's, or fewer than two seeds are common."
    )
    return "\n".join(["", text, "", *_lines(["", "seeds", *columns], cells)]) + "\n"


def _distances(column: Sequence[Distance | None]) -> list[str]:
    """Format the distances of one metric, which are the rows that Holm's correction counts."""
    marked = bold([None if each is None else float(each.crossed.p_value()) for each in column])
    texts = []
    for each, mark in zip(column, marked, strict=True):
        if each is None:
            texts.append("")
            continue
        text = f"{float(each.crossed.difference):+.3f} {_bounds(each.crossed.interval())}"
        first, second = each.between
        place = f"beyond `{second}`" if each.beyond else f"`{first}` to `{second}`"
        texts.append(f"{f'**{text}**' if mark else text}<br>{place}")
    return texts


def frame(measured: Mapping[str, Sequence[Measured]]) -> pd.DataFrame:
    """Return a line for each run: its row, seed, steps, tokens, and the mean over problems of every metric."""
    return pd.DataFrame(
        [
            {"row": name, "seed": one.seed, "step": one.step, "tokens": one.tokens, **one.means()}
            for name, runs in measured.items()
            for one in runs
        ]
    )


def _lines(heads: Sequence[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _bounds(interval: Interval) -> str:
    return f"[{interval.low:+.3f}, {interval.high:+.3f}]"


def write_results(
    config: SweepConfig, cells: Sequence[Cell], finished: Mapping[Cell, Path], out: Path
) -> tuple[str, list[Path]]:
    """Write results.md, results.csv, pass_at_k.png and frontier.png to `out`; return the table and the paths.

    The table of a part of the runs is marked as partial. Raises UserError where nothing is finished.
    """
    if not finished:
        raise UserError(f"{config.name}: none of its {len(cells)} runs is finished")
    histories = {cell: read_run(folder) for cell, folder in finished.items()}
    suites = suites_of(config, next(iter(histories.values())))
    measured = measured_rows(config, histories, suites)
    # The first row of the case that the others are compared with.
    against = next((cell.row for cell in cells if cell.case == config.results.against), None)
    table = rows(measured, against)
    part = "" if len(finished) == len(cells) else f"**Partial: {len(finished)} of {len(cells)} runs are finished.** "
    averaged = f"average of {len(suites)} suites, " if len(suites) > 1 else ""
    text = (
        f"{part}{config.name} on {' + '.join(suites)}: {averaged}mean over runs [95% interval over problems]"
        "<br>lowest to highest run. Entropy in nats.\n\n"
    ) + markdown(table, config.results.k, against)
    if config.results.line:
        of_line = [cell.row for cell in cells if cell.case in config.results.line]
        line = [name for name in measured if name in {before_row(config), *of_line}]
        text += line_markdown(measured, line, config.results.k)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "results.md", text)
    with completed(out / "results.csv") as temporary:
        frame(measured).to_csv(temporary, index=False, float_format="%.6g")
    beside = [name for name in (before_row(config), against) if name in measured]
    picture = plot_panels({row.name: _banded(row) for row in table}, beside, config.name, out / "pass_at_k.png")
    # The smallest k of the table against the largest.
    ks = min(config.results.k), max(config.results.k)
    found = {name: [run.means() for run in runs] for name, runs in measured.items()}
    points = {name: [(one[f"pass@{ks[0]}"], one[f"pass@{ks[1]}"]) for one in each] for name, each in found.items()}
    frontier = plot_frontier(points, ks, config.name, out / "frontier.png")
    return text, [out / "results.md", out / "results.csv", picture, frontier]


def _banded(row: Row) -> Banded:
    found = {int(name.removeprefix("pass@")): row.figures[name] for name in row.figures if PASS.fullmatch(name)}
    return Banded(
        {k: estimate.mean for k, estimate in found.items()},
        {k: estimate.interval.low for k, estimate in found.items()},
        {k: estimate.interval.high for k, estimate in found.items()},
    )
