"""The curves of metrics.jsonl, each figure with all runs that have it, in sections that belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megasharp.evals.result import EvalResult
from megasharp.report.page.records import Figure, Points, Series
from megasharp.report.page.sampling import rounded, thinned
from megasharp.runs.history import RunHistory

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
