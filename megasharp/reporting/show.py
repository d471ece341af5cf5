"""Runs on the screen: one run with its warnings (`screen`), or several beside each other (`page`).

In reading order: the curves of a run and the warnings about them; the screen of one run, with its state, time,
attempts, checkpoints and curves; several runs with the keys in which they differ, their metrics at the steps that all
of them have and at their ends, and their cost. The HTML report takes its warnings from here too.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from megasharp.checkpoint.attempts import AttemptRecord
from megasharp.common.control import ControlState
from megasharp.config.core import Tree, flat
from megasharp.reporting.history import (
    KEEP_BEST,
    Peak,
    RunHistory,
    evaluated_suites,
    find_peak,
    goodput,
    kept_responses,
    superseded,
)
from megasharp.reporting.history import duration as attempt_seconds
from megasharp.reporting.number_text import Columns, duration, moment, size

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` in at most `width` blocks, each the mean of an equal share of them, from lowest to highest."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return BLOCKS[3] * count
    return "".join(BLOCKS[min(int((mean - low) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


# pass@k of one model varies by about a hundredth from seed to seed; less than this is no trend.
_NOTICEABLE = 0.02
_RECENT = 50
_FEW_FAILURES = 0.01


@dataclass(frozen=True, slots=True)
class Trend:
    """One metric over the steps; `best` is None where neither more nor less is better."""

    label: str
    points: list[tuple[int, float]]
    best: tuple[int, float] | None


def trends(history: RunHistory) -> list[Trend]:
    """Return reward, entropy, and of each suite pass@k at its smallest and largest k, as far as rows have them."""
    found = [Trend("reward", history.series("reward/mean"), None)]
    found += [
        Trend(f"{suite} pass@{k}", history.series(f"eval/{suite}/pass@{k}"), None)
        for suite, ks in sorted(evaluated_suites(history.evaluations.values()).items())
        for k in sorted({ks[0], ks[-1]})
    ]
    graded = [Trend(t.label, t.points, max(t.points, key=lambda p: p[1])) for t in found if t.points]
    entropy = history.series("entropy/policy")
    return [*graded, Trend("entropy", entropy, None)] if entropy else graded


def warnings(history: RunHistory) -> list[str]:
    """List what looks wrong, a line each."""
    return [
        *collapse(history),
        *_entropy(history),
        *_steps(history),
        *_attempt_marks(history),
        *_checkpoint_marks(history),
        *_stale_summary(history),
    ]


def collapse(history: RunHistory) -> Iterator[str]:
    """Yield a line for each suite whose pass@k falls at the largest k and rises at the smallest."""
    for suite, ks in sorted(evaluated_suites(history.evaluations.values()).items()):
        one, many = (history.series(f"eval/{suite}/pass@{k}") for k in (ks[0], ks[-1]))
        if len(one) < 2 or len(many) < 2 or ks[0] == ks[-1]:
            continue
        if one[-1][1] - one[0][1] > _NOTICEABLE and many[0][1] - many[-1][1] > _NOTICEABLE:
            yield (
                f"{suite}: pass@{ks[-1]} falls ({many[0][1]:.3f} to {many[-1][1]:.3f}) while pass@{ks[0]} rises "
                f"({one[0][1]:.3f} to {one[-1][1]:.3f}): the policy is collapsing onto few answers"
            )


def _entropy(history: RunHistory) -> Iterator[str]:
    points = history.series("entropy/policy")
    if points and points[-1][1] < 0.1 * points[0][1]:
        yield f"entropy is {points[-1][1]:.3g} nats, less than a tenth of the first step's {points[0][1]:.3g}"


def _steps(history: RunHistory) -> Iterator[str]:
    recent = history.training[-_RECENT:]
    failed = [row.get("reward/errors") or 0.0 for row in recent]
    share = max(sum(failed) / len(failed), failed[-1]) if failed else 0.0
    if share > _FEW_FAILURES:
        yield f"{share:.0%} of the last rewards failed, as logs/attempt_*/verifiers.log says; mend the reward first"
        # The other warnings would be consequences of that.
        return
    limits = {
        "policy/skipped": (0.0, "of the last updates were left out (non-finite, or every group dropped)"),
        "rollout/truncated": (0.25, "of the last responses met the length limit; see data.stages"),
        "rollout/turns_cut": (0.25, "of the last responses met the limit of turns; see rollout.episodes.max_turns"),
        "group/zero_advantage": (0.8, "of the last groups teach nothing; see dynamic_sampling, or other prompts"),
    }
    for name, (limit, words) in limits.items():
        values = [value for row in recent if (value := row.get(name)) is not None]
        mean = sum(values) / len(values) if values else 0.0
        if mean > limit:
            yield f"{mean:.0%} {words}"


def _attempt_marks(history: RunHistory) -> Iterator[str]:
    ended = [record for record in history.attempts.values() if record is not None]
    last = ended[-2:]
    over = not history.alive and history.state != "finished"
    if over and len(last) == 2 and all(record.last_step is None for record in last):
        yield "the last two attempts finished no step"
    if over and history.state == "killed":
        by_job = "submit it again, or by hand " if ended[-1].slurm_job_id is not None else ""
        yield f"the last attempt was killed, without a word in its record; {by_job}continue with --resume"


def _checkpoint_marks(history: RunHistory) -> Iterator[str]:
    yield from (f"checkpoint of step {entry.step}: {entry.problem}" for entry in history.checkpoints if entry.problem)


def _stale_summary(history: RunHistory) -> Iterator[str]:
    """Yield a line where the run went on after summary.json was written: no figure is read from that file."""
    try:
        steps = json.loads((history.folder / "summary.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if steps != history.last_step:
        yield f"summary.json is of step {steps} and the run of step {history.last_step}; its end writes it anew"


# Limits of one screen: the newest attempts, checkpoints and events, and column widths in characters.
_ATTEMPTS, _CHECKPOINTS, _EVENTS, _WIDTH, _REASON = 5, 3, 3, 40, 160
# Letters of the last reason, which is said once: a message is whole, a log is not.
_WHOLE = 800
# The mean of this many last steps estimates the next ones.
_PACE = 50


def submitted_screen(folder: Path, standing: str) -> RenderableType:
    """Lay out the screen of a run that was submitted and has not begun; `standing` says where its job stands."""
    return Group(Text(f"{folder.name}  {folder}", style="bold"), Text(standing))


def screen(history: RunHistory, standing: str | None = None) -> RenderableType:
    """Lay out the screen of one run; `standing` says where the job stands that is to go on with it."""
    blocks: list[list[RenderableType]] = [
        [
            Text(f"{history.name}  {history.folder}", style="bold"),
            *map(Text, [*([standing] if standing else []), *_standing(history), *_discarded(history)]),
        ],
        [_attempts(history)],
        [_checkpoints(history)],
        [*map(Text, _decisions(history))],
        [_trends(trends(history))],
        [Text(f"! {line}", style="yellow") for line in warnings(history)],
    ]
    return Group(*(part for block in blocks if block for part in (*block, Text())))


def _standing(history: RunHistory) -> Iterator[str]:
    last, steps = history.last_step, history.steps
    of = f" of {steps}, {last / steps:.0%}" if steps else ""
    if history.token_budget:
        of = f" of {steps} at most, tokens {history.tokens:,} of {history.token_budget:,}"
    yield f"{_short(history.state, _WHOLE)}  step {last}{of}{_pace(history)}"
    spent = goodput(history)
    if spent.share is None:
        return
    parts = {
        "steps": spent.useful,
        "evaluations": spent.evaluation,
        "checkpoints": spent.checkpoint,
        "starts": spent.start,
        "repeated": spent.repeated,
        "rest": spent.rest,
    }
    shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds >= 0.5)
    about = " (estimated: an attempt has no record)" if spent.estimated else ""
    yield f"goodput  {spent.share:.0%} of {duration(spent.wall)}: {shown}{about}"


def _discarded(history: RunHistory) -> Iterator[str]:
    """Say how many responses the last steps threw away, and how long they were beside those that were trained."""
    recent = history.training[-_PACE:]

    def total(name: str) -> float:
        return sum(row.get(f"responses/{name}") or 0.0 for row in recent)

    count = total("discarded")
    if not count:
        return
    lengths = f"{total('discarded_tokens') / count:,.0f} tokens on average"
    if total("trained"):
        lengths += f", the {total('trained'):,.0f} trained ones {total('trained_tokens') / total('trained'):,.0f}"
    yield f"discarded  {count:,.0f} responses in the last {len(recent)} steps: {lengths}"


def _pace(history: RunHistory) -> str:
    """Format seconds per step and the time left; evaluations and saves among the last steps count in both."""
    recent = history.training[-_PACE:]
    if not recent:
        return ""
    after = [
        row for row in history.rows if row.get("time/step") is None and (row["step"] or 0) >= (recent[0]["step"] or 0)
    ]
    apart = sum(value or 0.0 for row in after for name, value in row.items() if name.startswith("time/"))
    pace = (sum(row["time/step"] or 0.0 for row in recent) + apart) / len(recent)
    left = float((history.steps or 0) - history.last_step)
    if history.token_budget and history.tokens:
        # The token budget may end the run before its steps do.
        left = min(left, (history.token_budget / history.tokens - 1) * history.last_step)
    word = "ETA" if history.alive else "left if it goes on"
    return f"  {pace:.3g} s a step" + (f"  {word} {duration(left * pace)}" if left > 0 else "")


def _attempts(history: RunHistory) -> RenderableType:
    shown = list(history.attempts.items())[-_ATTEMPTS:]
    if not shown:
        return Text("attempts  none")
    hidden = len(history.attempts) - len(shown)
    table = Columns("attempt", "begun", "where", "steps", "time", "end", style="dim")
    for number, record in shown:
        running = history.alive and number == shown[-1][0]
        table.add_row(str(number), *(_attempt(record, history, running) if record else ["no record"]))
    title = restarts(history)
    return Group(Text(title + (f", {hidden} earlier not shown" if hidden else "")), table)


def restarts(history: RunHistory) -> str:
    """Format the number of restarts."""
    return "1 restart" if history.restarts == 1 else f"{history.restarts} restarts"


def _attempt(record: AttemptRecord, history: RunHistory, running: bool) -> Iterator[str]:
    yield moment(record.started)
    job = f" job {record.slurm_job_id}" if record.slurm_job_id else ""
    yield f"{record.host}{job}"
    yield "none" if record.first_step is None else f"{record.first_step} to {record.last_step}"
    yield duration(attempt_seconds(record, history))
    if record.ended is None:
        yield "running" if running else "killed"
    else:
        yield _short(str(record.reason)) + (f" (exit {record.exit_code})" if record.exit_code else "")


def _short(reason: str, most: int = _REASON) -> str:
    """Shorten a reason: that of a lost engine holds the last lines of its log, and the attempt's record has all."""
    return textwrap.shorten(reason, most, placeholder=" ...")


def _checkpoints(history: RunHistory) -> RenderableType:
    shown = history.checkpoints[-_CHECKPOINTS:]
    if not shown:
        return Text("checkpoints  none")
    peak = peak_of(history)
    # The checkpoint that `checkpoint.keep_best` keeps, by the curve: the newest checkpoint's record may be older.
    best = peak.step if peak is not None and peak.chosen_by == KEEP_BEST else None
    if best is not None and best not in {entry.step for entry in shown}:
        shown = [*(entry for entry in history.checkpoints if entry.step == best), *shown]
    table = Columns("checkpoint", "written", "size", "", style="dim")
    for entry in shown:
        written = moment(entry.written) if entry.written else "-"
        notes = [entry.problem or "complete", *(["the best"] if entry.step == best else [])]
        table.add_row(f"step {entry.step}", written, size(entry.size) if entry.size else "-", ", ".join(notes))
    return Group(table, Text("complete: every file is there with its size; a resume compares the hashes too", "dim"))


def control_of(history: RunHistory) -> ControlState | None:
    """Return the control state (resets, stages) in the run's newest checkpoint."""
    found = [entry.manifest.control for entry in history.checkpoints if entry.manifest is not None]
    return found[-1] if found else None


def peak_of(history: RunHistory) -> Peak | None:
    """Return a run's peak, from all evaluations that its folder has."""
    whole = [entry.step for entry in history.checkpoints if entry.problem is None]
    control = control_of(history)
    return find_peak(history.config, history.evaluations, whole, {} if control is None else control.best)


def _decisions(history: RunHistory) -> Iterator[str]:
    peak, control = peak_of(history), control_of(history)
    if peak is not None:
        yield peak.line
    yield from (said for said in (kept_responses(history), superseded(history)) if said)
    if control is None:
        return
    done, changes = control.resets.done, control.lengths.changes
    if done:
        before = f"{len(done) - _EVENTS} before; " if len(done) > _EVENTS else ""
        last = "; ".join(f"after step {reset.step} ({reset.reason})" for reset in done[-_EVENTS:])
        yield f"resets  {before}{last}"
    if changes:
        last = "; ".join(f"{c.max_response_tokens} after step {c.step} ({c.reason})" for c in changes[-_EVENTS:])
        yield f"response limits  {last}"


def _trends(found: list[Trend]) -> RenderableType:
    if not found:
        return Text("no metrics yet")
    table = Columns("metric", "", "first", "best", "last", style="dim")
    for trend in found:
        values = [value for _, value in trend.points]
        best = f"{trend.best[1]:.3f} at {trend.best[0]}" if trend.best else ""
        table.add_row(trend.label, sparkline(values, _WIDTH), f"{values[0]:.3f}", best, f"{values[-1]:.3f}")
    return table


# Keys that name a run and do not change what it does.
_NAMES = frozenset({"name"})
_MISSING = "-"
_EQUAL_STEPS = 4


def numbered(tree: Tree) -> Iterator[tuple[str, object]]:
    """Flatten a tree as `flat` does, and tables in lists by their number."""
    for key, value in flat(tree):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from ((f"{key}[{number}].{inner}", found) for inner, found in numbered(item))
        else:
            yield key, value


def differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Return the keys in which the runs differ, with each run's value; `-` where a run has none."""
    trees = [dict(numbered(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for tree in trees for key in tree) if key not in _NAMES]
    values = {key: [str(tree[key]) if key in tree else _MISSING for tree in trees] for key in keys}
    return {key: shown for key, shown in values.items() if len(set(shown)) > 1}


def figures(runs: Sequence[RunHistory]) -> list[str]:
    """List the metrics to compare: those of steps, then pass@k of every suite, as far as some run has them."""
    steps = ["reward/mean", "entropy/policy", "rollout/length_mean"]
    by_suite: dict[str, set[int]] = {}
    for run in runs:
        for suite, ks in evaluated_suites(run.evaluations.values()).items():
            by_suite.setdefault(suite, set()).update(ks)
    names = [*steps, *(f"eval/{suite}/pass@{k}" for suite, ks in sorted(by_suite.items()) for k in sorted(ks))]
    return [name for name in names if any(run.series(name) for run in runs)]


def shared_steps(series: Sequence[Mapping[int, float]]) -> list[int]:
    """Choose a few steps, evenly, at which every run has the metric; the last such step is always among them."""
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) <= _EQUAL_STEPS:
        return common
    places = [round(i * (len(common) - 1) / (_EQUAL_STEPS - 1)) for i in range(_EQUAL_STEPS)]
    return [common[place] for place in places]


def page(runs: Mapping[str, RunHistory]) -> RenderableType:
    """Lay out the keys that differ, then each metric at equal steps and at each run's end, then the cost.

    `runs` are by the headings of their columns.
    """
    keys = Columns("key", *runs, style="bold")
    found = differences([*runs.values()])
    for key, values in found.items():
        keys.add_row(key, *values)
    parts: list[RenderableType] = [keys if found else Text("the same configuration")]
    for name in figures([*runs.values()]):
        series = [dict(run.series(name)) for run in runs.values()]
        table = Columns(name, *runs, style="bold")
        for step in shared_steps(series):
            table.add_row(f"step {step}", *(f"{points[step]:.3f}" for points in series))
        ends = [f"{points[max(points)]:.3f} (step {max(points)})" if points else _MISSING for points in series]
        table.add_row("at the end", *ends)
        parts.append(table)
    cost = Columns("cost", *runs, style="bold")
    spent = [goodput(run) for run in runs.values()]
    cost.add_row("steps", *(f"{run.last_step} of {run.steps}, {_short(run.state)}" for run in runs.values()))
    cost.add_row("wall time", *(duration(one.wall) for one in spent))
    cost.add_row("goodput", *(_MISSING if one.share is None else f"{one.share:.0%}" for one in spent))
    seconds = [one.useful / max(len(run.training), 1) for one, run in zip(spent, runs.values(), strict=True)]
    cost.add_row("seconds a step, training alone", *(f"{value:.3g}" for value in seconds))
    return Group(*parts, cost)
