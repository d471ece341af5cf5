"""The part of the page that comes from metrics.jsonl, in reading order:

- `figures`: curves of all metrics, each with all runs that have it, in sections;
- `stages`: seconds of every stage over the steps, and an account of the whole time;
- `marks`: events of a run, which are restarts, resets, and stages of recipe and response length;
- `words`: the page's first sentences, on how pass@k moved and with what certainty, and how the runs end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from megasharp.checkpoint.attempts import FINISHED
from megasharp.evals.estimators import Interval, mean_intervals, pass_at_k
from megasharp.evals.result import EvalResult
from megasharp.metrics.names import in_words
from megasharp.reporting.history import RunHistory, goodput
from megasharp.reporting.number_text import duration
from megasharp.reporting.page.float_arrays import packed, thinned
from megasharp.reporting.page.records import Figure, Mark, Points, Series, Stages, ranges, rounded

# Points of one curve on the page: a point for each step of all but the longest runs.
MOST_POINTS = 5000
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
    (
        "Sources of the mixture",
        (
            r"reward/(?!function/).+/mean",
            r"group/.+/(pass@\d+|solved_\w+|dropped|prompts)",
            r"rollout/.+/(length_mean|truncated)",
        ),
    ),
    ("Groups", (r"group/solved_\w+", r"group/uniform", r"group/dropped")),
    ("Update", (r"policy/(loss|grad_norm|learning_rate|kl_old|kl_ref|ratio|skipped)",)),
    ("Experts", (r"experts/\w+",)),
    ("Response lengths", (r"rollout/length_mean", r"responses/lengths", r"rollout/truncated")),
    (
        "Turns with an environment",
        (r"rollout/turns?(_tokens|_cut)?", r"rollout/environment_\w+", r"rollout/context_max", r"eval/.+/turns"),
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
# A mixture's layers would be dozens of figures; `experts/load_max` is of the one that is most uneven.
_NOT_FIGURES = re.compile(r"step|time|experts/load_max_\d+")
# The figure that has several curves of a run: the page draws means dark and percentiles pale, what is discarded dashed.
_LENGTHS = "responses/lengths"
_OF_LENGTHS = {
    f"responses/{word}_length_{end}": f"{word}, {text}"
    for word in ("trained", "discarded")
    for end, text in (("mean", "mean"), ("p90", "90th percentile"))
}

Results = Mapping[tuple[int, int, str], EvalResult]


def figures(runs: Sequence[RunHistory], results: Results) -> list[Figure]:
    """Make the figures that some run has, in the order of the sections; evaluations with their intervals."""
    tables = (table for run in runs for table in (*run.rows, *run.evaluations.values()))
    names = dict.fromkeys(_LENGTHS if name in _OF_LENGTHS else name for table in tables for name in table)
    placed = sorted((_place(name), name) for name in names if not _NOT_FIGURES.fullmatch(name))
    made = []
    for (section, *_), name in placed:
        curves = _OF_LENGTHS if name == _LENGTHS else {name: ""}
        series = [
            one
            for place, run in enumerate(runs)
            for curve, label in curves.items()
            if (one := _series(curve, label, run, place, results)) is not None
        ]
        if series:
            heading = _SECTIONS[section][0] if section < len(_SECTIONS) else OTHER
            zero = all(isinstance(one.y, list) and one.y[:2] == [0.0, 0.0] for one in series)
            made.append(Figure(name, in_words(name), heading, not name.startswith("eval/"), zero, series))
    return made


def _place(name: str) -> tuple[int, int, tuple[str | int, ...]]:
    for section, (_, patterns) in enumerate(_SECTIONS):
        for place, pattern in enumerate(patterns):
            if re.fullmatch(pattern, name):
                return section, place, _natural(name)
    return len(_SECTIONS), 0, _natural(name)


def _natural(name: str) -> tuple[str | int, ...]:
    """Split a name so that pass@4 sorts before pass@16: texts and numbers alternate."""
    return tuple(int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name)))


def _series(name: str, label: str, run: RunHistory, place: int, results: Results) -> Series | None:
    """Return a metric's curve, of an evaluation with its intervals where every point has one; None without a point."""
    points = run.series(name)
    if not points:
        return None
    if not name.startswith("eval/"):
        steps_N, values_N = thinned(points, MOST_POINTS)
        return Series(place, packed(steps_N), packed(values_N), label)
    steps, values = zip(*points, strict=True)
    _, suite, figure = name.split("/", 2) if name.count("/") >= 2 else ("", "", "")
    found = [result.intervals.get(figure) for step in steps if (result := results.get((place, step, suite)))]
    bounds = [interval for interval in found if interval is not None]
    if len(bounds) < len(steps):
        return Series(place, packed(steps), packed(values), label)
    low, high = (packed([getattr(interval, end) for interval in bounds]) for end in ("low", "high"))
    return Series(place, packed(steps), packed(values), label, low, high)


MOST_COLUMNS = 60
_LEAST_S = 0.05


def stages(number: int, run: RunHistory) -> Stages | None:
    """Return a run's stages, the longest first; None before its first step."""
    rows = list(run.stages.items())
    totals: dict[str, float] = {}
    for _, seconds in rows:
        for name, value in seconds.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals or not run.training:
        return None
    # As the run's closing table: what took no time that shows has no colour.
    names = sorted((name for name in totals if totals[name] >= _LEAST_S), key=lambda name: -totals[name])
    columns: Points = []
    for part in ranges(len(rows), MOST_COLUMNS):
        chosen = [rows[place] for place in part]
        means = [rounded(sum(seconds.get(name, 0.0) for _, seconds in chosen) / len(chosen), 4) for name in names]
        columns.append([float(chosen[0][0]), float(chosen[-1][0]), *means])
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
    account = [*share, *([name, duration(seconds)] for name, seconds in parts.items() if seconds >= 0.5)]
    return Stages(number, names, columns, account)


def marks(run: RunHistory) -> list[Mark]:
    """Return a run's events in the order of the steps after which they happened."""
    found = [*_restarts(run), *_resets(run), *_lengths(run), *_recipes(run)]
    return sorted(found, key=lambda mark: (mark.step, mark.kind, mark.text))


def _restarts(run: RunHistory) -> Iterator[Mark]:
    attempts = list(run.attempts.items())
    for (_, before), (number, record) in pairwise(attempts):
        if record is not None:
            why = f": the one before {_ended(before.reason)}" if before is not None else ""
            yield Mark("restart", record.from_step, f"attempt {number} begins{why}")


def _ended(reason: str | None) -> str:
    return "was killed" if reason is None else reason if reason == FINISHED else f"ended by {reason}"[:160]


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
# Without rows to compare problem by problem, a smaller difference counts as no change.
_NOTICEABLE = 0.02


def words(runs: Sequence[RunHistory], names: Sequence[str], results: Results) -> list[str]:
    """Write the page's first sentences; none before the second evaluation."""
    lines = [line for number in range(len(runs)) for line in _of_run(number, names[number], results)]
    lines += _between(runs, names, results)
    note = ["In brackets: 95% intervals of the change, over the same problems."] if lines else []
    return [*lines, *note, *(line for number, run in enumerate(runs) for line in _entropy(run, names[number]))]


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
    """The change of one pass@k between two results of one suite; `direction` is 0 where the interval contains 0."""

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
    """Return the 95% interval of the mean change over problems; None where the problems are not the same."""
    before, after = (
        {row.id: pass_at_k(row.samples, row.correct, k) for row in result.rows if row.samples >= k}
        for result in (first, last)
    )
    if not before or before.keys() != after.keys():
        return None
    return mean_intervals(np.array([[after[key] - before[key]] for key in before]), seed=_SEED)[0]


def _between(runs: Sequence[RunHistory], names: Sequence[str], results: Results) -> Iterator[str]:
    """Compare the runs' ends at the largest k that all have.

    A run that was measured only before its first step has no end.
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
        best, worst = order[0], order[-1]
        same = not _Change(last[worst], last[best], k).direction
        noise = f" ({names[best]} against {names[worst]}: within the noise over problems)" if same else ""
        steps_differ = len(set(at.values())) > 1
        ends = ", ".join(
            f"{names[run]} {last[run].pass_at_k[k]:.2f}" + f" (step {at[run]})" * steps_differ for run in order
        )
        yield f"At the end, pass@{k} on {suite}: {ends}{noise}."


def _entropy(run: RunHistory, name: str) -> Iterator[str]:
    points = run.series("entropy/policy")
    if len(points) > 1:
        tenth = max(1, len(points) // 10)
        before, after = (float(np.mean([value for _, value in part])) for part in (points[:tenth], points[-tenth:]))
        verb = "falls" if after < 0.9 * before else "rises" if after > 1.1 * before else "stays about the same"
        of = f"means of the first and last {tenth} steps" if tenth > 1 else "first and last step"
        yield f"{name}: token entropy {verb}, {before:.2f} to {after:.2f} nats ({of})."


def _suites(results: Results) -> list[str]:
    return sorted({suite for _, _, suite in results})
