"""The few curves that a screen shows of a run, and what in them a person should be told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megasharp.runs.history import RunHistory

_PASS = re.compile(r"eval/(?P<suite>.+)/pass@(?P<k>\d+)$")
# An evaluation's figures move by about a hundredth from seed to seed; less than this is no trend.
_NOTICEABLE = 0.02
_RECENT = 50


@dataclass(frozen=True, slots=True)
class Trend:
    """One figure over the steps; `best` is None where neither more nor less is better."""

    label: str
    points: list[tuple[int, float]]
    best: tuple[int, float] | None


def trends(history: RunHistory) -> list[Trend]:
    """Reward, entropy, and of each suite pass@k at its smallest and largest k; figures that no row has are left out."""
    found = [Trend("reward", history.series("reward/mean"), None)]
    found += [
        Trend(f"{suite} pass@{k}", history.series(f"eval/{suite}/pass@{k}"), None)
        for suite, ks in suites(history).items()
        for k in sorted({ks[0], ks[-1]})
    ]
    graded = [Trend(t.label, t.points, max(t.points, key=lambda p: p[1])) for t in found if t.points]
    entropy = history.series("entropy/policy")
    return [*graded, Trend("entropy", entropy, None)] if entropy else graded


def suites(history: RunHistory) -> dict[str, list[int]]:
    """The suites that were evaluated, each with its values of k in order."""
    found: dict[str, set[int]] = {}
    for match in (match for row in history.rows for name in row if (match := _PASS.match(name))):
        found.setdefault(match["suite"], set()).add(int(match["k"]))
    return {suite: sorted(found[suite]) for suite in sorted(found)}


def warnings(history: RunHistory) -> list[str]:
    """What looks wrong, a line each."""
    return [*collapse(history), *_entropy(history), *_steps(history), *_attempts(history), *_checkpoints(history)]


def collapse(history: RunHistory) -> Iterator[str]:
    """Of each suite whose pass@k at the largest k falls while that at the smallest rises, a line."""
    for suite, ks in suites(history).items():
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
    limits = {
        "policy/skipped": (0.0, "of the last updates were left out (non-finite, or every group dropped)"),
        "rollout/truncated": (0.25, "of the last responses met the length limit; see data.stages"),
        "group/zero_advantage": (0.8, "of the last groups teach nothing; see dynamic_sampling, or other prompts"),
    }
    for name, (limit, words) in limits.items():
        values = [value for row in recent if (value := row.get(name)) is not None]
        mean = sum(values) / len(values) if values else 0.0
        if mean > limit:
            yield f"{mean:.0%} {words}"


def _attempts(history: RunHistory) -> Iterator[str]:
    ended = [record for record in history.attempts.values() if record is not None]
    last = ended[-2:]
    over = not history.alive and history.state != "finished"
    if over and len(last) == 2 and all(record.last_step is None for record in last):
        yield "the last two attempts finished no step"
    if over and history.state == "killed":
        yield "the last attempt was killed, without a word in its record; continue with --resume"


def _checkpoints(history: RunHistory) -> Iterator[str]:
    yield from (f"checkpoint of step {entry.step}: {entry.problem}" for entry in history.checkpoints if entry.problem)
