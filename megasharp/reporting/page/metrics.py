"""The curves of metrics.jsonl, each figure with all runs that have it, in sections that belong together.

Where each run's time went: seconds of every stage over the steps, and the whole accounted for.

What happened to a run in its course: attempts that began anew, resets, stages of recipe and response length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

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
