"""Several runs side by side: which keys differ, and figures at the steps that all of them have, and at their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from megasharp.config.core import Tree, flat
from megasharp.reporting.history import RunHistory, goodput
from megasharp.reporting.number_text import Columns, duration
from megasharp.reporting.show import suites

# Keys that say who a run is, not what it does.
_NAMES = frozenset({"name"})
_MISSING = "-"
_EQUAL_STEPS = 4


def numbered(tree: Tree) -> Iterator[tuple[str, object]]:
    """`flat`, with the tables in lists by number."""
    for key, value in flat(tree):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from ((f"{key}[{number}].{inner}", found) for inner, found in numbered(item))
        else:
            yield key, value


def differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """The keys in which the runs differ, with each run's value; `-` where a run has none."""
    trees = [dict(numbered(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for tree in trees for key in tree) if key not in _NAMES]
    values = {key: [str(tree[key]) if key in tree else _MISSING for tree in trees] for key in keys}
    return {key: shown for key, shown in values.items() if len(set(shown)) > 1}


def figures(runs: Sequence[RunHistory]) -> list[str]:
    """The figures that are compared: those of steps, then pass@k of every suite, as far as some run has them."""
    steps = ["reward/mean", "entropy/policy", "rollout/length_mean"]
    by_suite: dict[str, set[int]] = {}
    for run in runs:
        for suite, ks in suites(run).items():
            by_suite.setdefault(suite, set()).update(ks)
    names = [*steps, *(f"eval/{suite}/pass@{k}" for suite, ks in sorted(by_suite.items()) for k in sorted(ks))]
    return [name for name in names if any(run.series(name) for run in runs)]


def shared_steps(series: Sequence[Mapping[int, float]]) -> list[int]:
    """A few steps, evenly chosen, at which every run has the figure; the last of them is always among them."""
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) <= _EQUAL_STEPS:
        return common
    places = [round(i * (len(common) - 1) / (_EQUAL_STEPS - 1)) for i in range(_EQUAL_STEPS)]
    return [common[place] for place in places]


def page(runs: Mapping[str, RunHistory]) -> RenderableType:
    """Keys that differ, then each figure at equal steps and at the end of each run, then what it cost.

    `runs` are by what their columns are headed with.
    """
    parts: list[RenderableType] = [_keys(runs)]
    parts += [_figure(name, runs) for name in figures([*runs.values()])]
    return Group(*parts, _cost(runs))


def _keys(runs: Mapping[str, RunHistory]) -> RenderableType:
    found = differences([*runs.values()])
    if not found:
        return Text("the same configuration")
    table = Columns("key", *runs, style="bold")
    for key, values in found.items():
        table.add_row(key, *values)
    return table


def _figure(name: str, runs: Mapping[str, RunHistory]) -> RenderableType:
    series = [dict(run.series(name)) for run in runs.values()]
    table = Columns(name, *runs, style="bold")
    for step in shared_steps(series):
        table.add_row(f"step {step}", *(f"{points[step]:.3f}" for points in series))
    table.add_row("at the end", *(_end(points) for points in series))
    return table


def _end(points: Mapping[int, float]) -> str:
    if not points:
        return _MISSING
    last = max(points)
    return f"{points[last]:.3f} (step {last})"


def _cost(runs: Mapping[str, RunHistory]) -> RenderableType:
    table = Columns("cost", *runs, style="bold")
    spent = [goodput(run) for run in runs.values()]
    table.add_row("steps", *(f"{run.last_step} of {run.steps}, {run.state}" for run in runs.values()))
    table.add_row("wall time", *(duration(one.wall) for one in spent))
    table.add_row("goodput", *(_MISSING if one.share is None else f"{one.share:.0%}" for one in spent))
    seconds = [one.useful / max(len(run.training), 1) for one, run in zip(spent, runs.values(), strict=True)]
    table.add_row("seconds a step", *(f"{value:.3g}" for value in seconds))
    return table
