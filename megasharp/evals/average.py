"""Several suites as one table: a row for each, and their unweighted average, as the papers' tables end in.

A suite that was measured several times (`repeats`) is one row: each problem's figures are averaged over them first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasharp.errors import UserError
from megasharp.evals.bootstrap import Interval, average_intervals
from megasharp.evals.columns import Column, columns, means
from megasharp.evals.result import EvalResult
from megasharp.files import write_text


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Figures by their names within a suite, and the intervals of those that have one."""

    problems: int
    figures: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A group's rows by the suites' names; `average` has the figures that all of them have.

    `group`, `label`, `step` name what was measured on what, `source` is the paper's table, `ours` names settings that
    the paper does not give.
    """

    group: str
    label: str
    step: int | None
    source: str
    ours: tuple[str, ...]
    rows: Mapping[str, GroupRow]
    average: GroupRow


def averaged(
    group: str, source: str, ours: Sequence[str], members: Mapping[str, Sequence[EvalResult]], seed: int
) -> GroupResult:
    """The table of `members`: by the suites' names the results of each suite's repeats, rows included.

    Raises:
        UserError: infra failures left no problem that all repeats of a suite can score.
    """
    tables = {name: _table(name, results) for name, results in members.items()}
    rows = {name: _row([table], seed) for name, table in tables.items()}
    first = next(iter(members.values()))[0]
    average = _row(list(tables.values()), seed)
    return GroupResult(group, first.label, first.step, source, tuple(ours), rows, average)


def save_group(result: GroupResult, folder: Path) -> Path:
    """Write `folder`/<group>.json, intervals as [low, high]; return its path. Raises UserError where it cannot be."""
    path = folder / f"{result.group}.json"
    tree = {
        "group": result.group,
        "label": result.label,
        "step": result.step,
        "source": result.source,
        "ours": list(result.ours),
        "suites": {name: _tree(row) for name, row in result.rows.items()},
        "average": _tree(result.average),
    }
    write_text(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")
    return path


def _tree(row: GroupRow) -> dict[str, object]:
    bounds = {name: [bound.low, bound.high] for name, bound in row.intervals.items()}
    return {"problems": row.problems, "figures": dict(row.figures), "intervals": bounds}


def _table(name: str, results: Sequence[EvalResult]) -> dict[str, Column]:
    """Each problem's figures, averaged over the repeats that a suite has; only problems that all of them can score."""
    shared = set.intersection(*({row.id for row in result.kept} for result in results))
    if not shared:
        raise UserError(f"suite {name}: infra failures left no problem that all {len(results)} repeats can score")
    found = [columns([row for row in result.kept if row.id in shared], result.ks, result.seed) for result in results]
    names = [figure for figure in found[0] if all(figure in table for table in found)]
    return {figure: np.mean([table[figure] for table in found], axis=0) for figure in names}


def _row(tables: Sequence[Mapping[str, Column]], seed: int) -> GroupRow:
    names = [name for name in tables[0] if all(name in table for table in tables)]
    each = [means(table) for table in tables]
    stacked = [np.stack([table[name] for name in names], axis=1) for table in tables]
    bounds = average_intervals(stacked, seed=seed)
    return GroupRow(
        problems=sum(len(table) for table in stacked),
        figures={name: sum(figures[name] for figures in each) / len(each) for name in names},
        intervals={name: bound for name, bound in zip(names, bounds, strict=True) if bound is not None},
    )
