"""The curves of metrics.jsonl, each figure with all runs that have it, in sections that belong together.

Where each run's time went: seconds of every stage over the steps, and the whole accounted for.

What happened to a run in its course: attempts that began anew, resets, stages of recipe and response length.

What a person should see, in sentences: how pass@k moved, with what certainty, and which run ends where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from megasharp.evals.estimators import Interval, mean_intervals, pass_at_k
from megasharp.evals.result import EvalResult
from megasharp.reporting.history import RunHistory, goodput
from megasharp.reporting.number_text import duration
from megasharp.reporting.page.records import Figure, Mark, Points, Series, Stages, ranges, rounded, thinned

# Points of one curve on the page.
MOST_POINTS = 400
OTHER = "Everything else"
_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward and pass@k", (r"reward/mean", r"eval/.+/pass@\d+", r"eval/.+/greedy")),
    ("Majority votes", (r"eval/.+/maj@\d+",)),
    (
        "Entropies",
        (
            r"entropy/policy",
            r"entropy/correct",
            r"entropy/incorrect",
            r"entropy/response_mean",
            r"group/answer_entropy",
            r"eval/.+/(token|answer)_entropy",
            r"(group|eval/.+)/distinct_correct",
        ),
    ),
    ("Candidates: \u039b(n)", (r"candidates/lambda_\d+", r"candidates/lambda_sample", r"candidates/distinct_next")),
    (
        "Gates and clipping",
        (r"candidates/(gate|top1)_rate", r"policy/clip_\w+", r"method/.+(gate|rate|share).*", r"group/zero_advantage"),
    ),
    ("Groups", (r"group/solved_\w+", r"group/uniform", r"group/dropped")),
    (
        "Update",
        (r"policy/(loss|grad_norm|learning_rate|kl_old|kl_ref|ratio|skipped)", r"rollout/(length_mean|truncated)"),
    ),
    (
        "Throughput",
        (
            r"rollout/tokens_per_second",
            r"time/step",
            r"update/\w+_seconds",
            r"mem/peak_rss_mb",
            r"batch/(padding|imbalance)",
        ),
    ),
    ("GPUs (NVML)", (r"gpu/.+",)),
)
_TITLES = {
    "reward/mean": "mean reward",
    "entropy/policy": "token entropy (nats)",
    "rollout/tokens_per_second": "response tokens per second",
    "time/step": "seconds a step",
    "mem/peak_rss_mb": "peak memory of the driver (MiB)",
    "batch/padding": "share of packed rows that are padding",
    "batch/imbalance": "FLOPs of the largest data-parallel rank over the mean, minus 1",
}
_NOT_FIGURES = ("step", "time")

Results = Mapping[tuple[int, int, str], EvalResult]


def figures(runs: Sequence[RunHistory], results: Results) -> list[Figure]:
    """All figures that some run has, in the order of the sections; evaluations with their intervals."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row if name not in _NOT_FIGURES)
    placed = sorted((_place(name), name) for name in names)
    made = [_figure(name, section, runs, results) for (section, *_), name in placed]
    return [figure for figure in made if figure.series]


def _place(name: str) -> tuple[int, int, tuple[str | int, ...]]:
    for section, (_, patterns) in enumerate(_SECTIONS):
        for place, pattern in enumerate(patterns):
            if re.fullmatch(pattern, name):
                return section, place, _natural(name)
    return len(_SECTIONS), 0, _natural(name)


def _natural(name: str) -> tuple[str | int, ...]:
    """So that pass@4 comes before pass@16; texts and numbers take turns."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name)))


def _figure(name: str, section: int, runs: Sequence[RunHistory], results: Results) -> Figure:
    title = _SECTIONS[section][0] if section < len(_SECTIONS) else OTHER
    series = [Series(place, _points(name, run, place, results)) for place, run in enumerate(runs)]
    drawn = [one for one in series if one.points]
    return Figure(name, _TITLES.get(name, name.removeprefix("eval/")), title, not name.startswith("eval/"), drawn)


def _points(name: str, run: RunHistory, place: int, results: Results) -> Points:
    points = run.series(name)
    if not name.startswith("eval/"):
        return thinned(points, MOST_POINTS)
    _, suite, figure = name.split("/", 2) if name.count("/") >= 2 else ("", "", "")
    found = []
    for step, value in points:
        result = results.get((place, step, suite))
        interval = result.intervals.get(figure) if result is not None else None
        bounds = [rounded(interval.low), rounded(interval.high)] if interval is not None else []
        found.append([float(step), rounded(value), *bounds])
    return found


MOST_COLUMNS = 60


def stages(number: int, run: RunHistory) -> Stages | None:
    """The stages of a run, the one that took longest first; None before its first step."""
    rows = list(run.stages.items())
    totals: dict[str, float] = {}
    for _, seconds in rows:
        for name, value in seconds.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals or not run.training:
        return None
    names = sorted(totals, key=lambda name: -totals[name])
    columns: Points = []
    for part in ranges(len(rows), MOST_COLUMNS):
        chosen = [rows[place] for place in part]
        means = [rounded(sum(seconds.get(name, 0.0) for _, seconds in chosen) / len(chosen), 4) for name in names]
        columns.append([float(chosen[0][0]), float(chosen[-1][0]), *means])
    return Stages(number, names, columns, _account(run))


def _account(run: RunHistory) -> list[list[str]]:
    spent = goodput(run)
    parts = {
        "wall time": spent.wall,
        "steps that count": spent.useful,
        "evaluations": spent.evaluation,
        "checkpoints": spent.checkpoint,
        "starts": spent.start,
        "repeated": spent.repeated,
        "rest": spent.rest,
    }
    share = [] if spent.share is None else [["goodput", f"{spent.share:.0%}"]]
    return [*share, *([name, duration(seconds)] for name, seconds in parts.items())]


def marks(run: RunHistory) -> list[Mark]:
    """In the order of steps; each is told after which step it happened."""
    found = [*_restarts(run), *_resets(run), *_lengths(run), *_recipes(run)]
    return sorted(found, key=lambda mark: (mark.step, mark.kind, mark.text))


def _restarts(run: RunHistory) -> Iterator[Mark]:
    attempts = list(run.attempts.items())
    for (_, before), (number, record) in pairwise(attempts):
        if record is not None:
            why = f": the one before {_ended(before.reason)}" if before is not None else ""
            yield Mark("restart", record.from_step, f"attempt {number} begins{why}")


def _ended(reason: str | None) -> str:
    return "was killed" if reason is None else f"ended by {reason}"[:160]


def _resets(run: RunHistory) -> Iterator[Mark]:
    for step, done in run.series("policy/reset"):
        if done:
            yield Mark("reset", step - 1, "reset of the reference or the optimizer")


def _lengths(run: RunHistory) -> Iterator[Mark]:
    for (_, before), (step, limit) in pairwise(run.series("rollout/length_limit")):
        if before != limit:
            yield Mark("stage", step - 1, f"responses of up to {limit:.0f} tokens")


def _recipes(run: RunHistory) -> Iterator[Mark]:
    recipe = run.config.get("recipe")
    schedule = recipe.get("schedule") if isinstance(recipe, dict) else None
    for stage in schedule if isinstance(schedule, list) else []:
        until = stage.get("until") if isinstance(stage, dict) else None
        if isinstance(until, int) and until < run.last_step:
            yield Mark("stage", until, f"the recipe's next stage after {', '.join(stage.get('methods', []))}")


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
