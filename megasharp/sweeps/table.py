"""A sweep's rows as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd

from megasharp.evals.columns import means
from megasharp.sweeps.results import MEAN, Estimate, Measured, Row

# Shown beside pass@k where they were measured, and how they are headed.
_BESIDE = {
    "distinct_correct": "distinct correct",
    "token_entropy": "token entropy",
    **{f"lambda_{n}": f"Lambda({n})" for n in (1, 2, 3)},
}


def markdown(rows: Sequence[Row], ks: Sequence[int], against: str | None) -> str:
    """The table: figures with intervals over problems, below them the lowest and the highest run; then differences.

    A difference is bold where its interval is on one side of zero and every pair of runs is on the same side.
    """
    shown = [*(f"pass@{k}" for k in ks), MEAN, *(name for name in _BESIDE if any(name in row.figures for row in rows))]
    heads = [_BESIDE.get(name, name) for name in shown]
    lines = [*_lines(["", "runs", *heads], (_figures(row, shown) for row in rows))]
    beside = [row for row in rows if row.difference]
    if beside:
        lines += ["", f"Minus `{against}`, problem by problem, runs of the same seed:", ""]
        lines += _lines(["", *heads], (_differences(row, shown) for row in beside))
    return "\n".join(lines) + "\n"


def frame(measured: Mapping[str, Sequence[Measured]]) -> pd.DataFrame:
    """A line for each run: its row, seed, steps, tokens, and the mean over problems of every figure."""
    return pd.DataFrame(
        [
            {"row": name, "seed": one.seed, "step": one.step, "tokens": one.tokens, **means(one.figures)}
            for name, runs in measured.items()
            for one in runs
        ]
    )


def _lines(heads: Sequence[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _figures(row: Row, shown: Sequence[str]) -> list[str]:
    several = len(row.seeds) > 1
    cells = [_estimate(row.figures[name], several) if name in row.figures else "" for name in shown]
    return [f"`{row.name}`", str(len(row.seeds)), *cells]


def _estimate(found: Estimate, several: bool) -> str:
    interval = f"{found.mean:.3f} [{found.interval.low:.3f}, {found.interval.high:.3f}]"
    return f"{interval}<br>{found.lowest:.3f} to {found.highest:.3f}" if several else interval


def _differences(row: Row, shown: Sequence[str]) -> list[str]:
    several = len(row.seeds) > 1
    cells = [_difference(row.difference[name], several) if name in row.difference else "" for name in shown]
    return [f"`{row.name}`", *cells]


def _difference(found: Estimate, several: bool) -> str:
    """Bold where neither the interval over problems nor the runs leave the sign open."""
    text = f"{found.mean:+.3f} [{found.interval.low:+.3f}, {found.interval.high:+.3f}]"
    if min(found.interval.low, found.lowest) > 0 or max(found.interval.high, found.highest) < 0:
        text = f"**{text}**"
    return f"{text}<br>{found.lowest:+.3f} to {found.highest:+.3f}" if several else text
