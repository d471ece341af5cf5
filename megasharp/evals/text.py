"""Results as lines to print: figures with their 95% intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megasharp.evals.average import GroupResult, GroupRow
from megasharp.evals.bootstrap import Interval
from megasharp.evals.result import EvalResult

# Simulated suites (success rates from a beta distribution, pass@1): intervals of 95% covered the truth in 77% of suites
# of 5 problems, 86% of 10, 93% of 20, 94% of 50.
_MANY = 20


def result_lines(result: EvalResult) -> Iterator[str]:
    """A heading, then one figure a line."""
    yield (
        f"{result.suite} of {result.label}: {result.problems} problems x {result.n} samples, temperature "
        f"{result.temperature:g}, top-p {result.top_p:g}, at most {result.max_tokens} tokens"
    )
    if result.left_out:
        yield f"  left out for infra failures: {result.left_out} problems"
    if result.problems < _MANY:
        yield f"  {result.problems} problems are few: the intervals are too narrow (of 10 they cover 86%, not 95%)"
    yield from (f"  {line}" for line in _figures(result.named(), result.intervals))


def group_lines(table: GroupResult) -> Iterator[str]:
    """A line per suite and one for the average: pass@1 and the largest k that all suites have."""
    ks = [int(name.removeprefix("pass@")) for name in table.average.figures if name.removeprefix("pass@").isdigit()]
    names = ["pass@1", f"pass@{max(ks)}"] if len(ks) > 1 else [f"pass@{k}" for k in ks]
    width = max(map(len, (*table.rows, "average")))
    yield f"{table.group} of {table.label} ({table.source})"
    for name, row in (*table.rows.items(), ("average", table.average)):
        yield f"  {name:<{width}}  " + "  ".join(f"{figure} {_with_interval(row, figure)}" for figure in names)


def _with_interval(row: GroupRow, figure: str) -> str:
    return f"{row.figures[figure]:.4f}{_interval(row.intervals.get(figure))}" if figure in row.figures else "-"


def _figures(figures: Mapping[str, float], intervals: Mapping[str, Interval]) -> Iterator[str]:
    width = max(map(len, figures))
    for name, value in figures.items():
        yield f"{name:<{width}}  {value:.4f}{_interval(intervals.get(name))}"


def _interval(bound: Interval | None) -> str:
    return "" if bound is None else f" [{bound.low:.4f}, {bound.high:.4f}]"
