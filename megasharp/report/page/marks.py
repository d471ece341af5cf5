"""What happened to a run in its course: attempts that began anew, resets, stages of recipe and response length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megasharp.report.page.records import Mark
from megasharp.runs.history import RunHistory


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
