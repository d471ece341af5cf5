"""What a person should see, in sentences: how pass@k moved, with what certainty, and which run ends where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megasharp.evals.estimators import Interval, mean_intervals, pass_at_k
from megasharp.evals.result import EvalResult
from megasharp.reporting.history import RunHistory
from megasharp.reporting.page.metrics import Results

_SEED = 0
# Without rows to compare problem by problem, less than this is called no change.
_NOTICEABLE = 0.02


def words(runs: Sequence[RunHistory], names: Sequence[str], results: Results) -> list[str]:
    """The page's first sentences; none before the second evaluation."""
    lines = [line for number in range(len(runs)) for line in _of_run(number, names[number], results)]
    lines += _between(runs, names, results)
    told = ["In brackets: 95% intervals of the change, over the same problems."] if lines else []
    return [*lines, *told, *(line for number, run in enumerate(runs) for line in _entropy(run, names[number]))]


def _of_run(run: int, name: str, results: Results) -> Iterator[str]:
    for suite in _suites(results):
        steps = sorted(step for number, step, found in results if (number, found) == (run, suite))
        if len(steps) < 2:
            continue
        first, last = results[run, steps[0], suite], results[run, steps[-1], suite]
        ks = sorted(first.pass_at_k.keys() & last.pass_at_k.keys())
        if len(ks) < 2:
            continue
        few, many = (_Change(first, last, k) for k in (ks[0], ks[-1]))
        where = f"{name}, {suite}, steps {steps[0]} to {steps[-1]}"
        if many.direction < 0 < few.direction:
            yield f"{where}: {many} while {few}. The policy is collapsing onto few answers."
        else:
            joint = "while" if few.direction * many.direction < 0 else "and"
            yield f"{where}: {few} {joint} {many}."


class _Change:
    """How one pass@k moved between two results of one suite; `direction` is 0 where the interval holds no change."""

    def __init__(self, first: EvalResult, last: EvalResult, k: int) -> None:
        self.k = k
        self.before, self.after = first.pass_at_k[k], last.pass_at_k[k]
        self.interval = _difference(first, last, k)
        change = self.after - self.before
        sure = (
            abs(change) > _NOTICEABLE if self.interval is None else not self.interval.low <= 0.0 <= self.interval.high
        )
        self.direction = (1 if change > 0 else -1) if sure else 0

    def __str__(self) -> str:
        verb = {1: "rises", -1: "falls", 0: "does not change beyond its noise"}[self.direction]
        moved = (
            f"from {self.before:.2f} to {self.after:.2f}"
            if self.direction
            else f"({self.before:.2f}, {self.after:.2f})"
        )
        sure = f" [{self.interval.low:+.2f}, {self.interval.high:+.2f}]" if self.interval else ""
        return f"pass@{self.k} {verb} {moved}{sure}"


def _difference(first: EvalResult, last: EvalResult, k: int) -> Interval | None:
    """The 95% interval of the mean change over problems, of the same problems; None where they are not the same."""
    before, after = (
        {row.id: pass_at_k(row.samples, row.correct, k) for row in result.rows if row.samples >= k}
        for result in (first, last)
    )
    if not before or before.keys() != after.keys():
        return None
    return mean_intervals(np.array([[after[key] - before[key]] for key in before]), seed=_SEED)[0]


def _between(runs: Sequence[RunHistory], names: Sequence[str], results: Results) -> Iterator[str]:
    """Which run ends highest at the largest k that all have.

    A run that was measured before its first step only has no end.
    """
    for suite in _suites(results) if len(runs) > 1 else []:
        last, at = {}, {}
        for run, history in enumerate(runs):
            steps = [step for number, step, found in results if (number, found) == (run, suite)]
            if steps and (max(steps) > 0 or not history.last_step):
                at[run] = max(steps)
                last[run] = results[run, at[run], suite]
        shared = set.intersection(*(set(result.pass_at_k) for result in last.values())) if len(last) > 1 else set()
        if not shared:
            continue
        k = max(shared)
        order = sorted(last, key=lambda run: -last[run].pass_at_k[k])
        told = "" if _Change(last[order[-1]], last[order[0]], k).direction else " (a difference within the noise)"
        steps_differ = len(set(at.values())) > 1
        ends = ", ".join(
            f"{names[run]} {last[run].pass_at_k[k]:.2f}" + f" (step {at[run]})" * steps_differ for run in order
        )
        yield f"At the end, pass@{k} on {suite}: {ends}{told}."


def _entropy(run: RunHistory, name: str) -> Iterator[str]:
    points = run.series("entropy/policy")
    if len(points) > 1:
        tenth = max(1, len(points) // 10)
        before, after = (float(np.mean([value for _, value in part])) for part in (points[:tenth], points[-tenth:]))
        verb = "falls" if after < 0.9 * before else "rises" if after > 1.1 * before else "stays about the same"
        of = f"means of the first and last {tenth} steps"
        yield f"{name}: token entropy {verb}, {before:.2f} to {after:.2f} nats ({of})."


def _suites(results: Results) -> list[str]:
    return sorted({suite for _, _, suite in results})
