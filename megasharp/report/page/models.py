"""Which weights the page speaks of: each run's base, its last, and some between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megasharp.report.page.records import Model
from megasharp.report.page.sampling import spread_out
from megasharp.runs.history import RunHistory

MOST_STEPS = 6


@dataclass(frozen=True, slots=True)
class Models:
    """The page's models, and where (run, step) is among them; runs from one base have step 0 in common."""

    all: list[Model]
    place: dict[tuple[int, int], int]


def choose_models(runs: Sequence[RunHistory], names: Sequence[str], steps: Sequence[Iterable[int]]) -> Models:
    """Of each run's `steps` (those with evaluations or probes) at most MOST_STEPS; step 0 is the base model's."""
    found: list[Model] = []
    place: dict[tuple[int, int], int] = {}
    bases: dict[str, int] = {}
    base_of = [_base(run) for run in runs]
    for number, run_steps in enumerate(steps):
        for step in (chosen := spread_out(sorted(set(run_steps)), MOST_STEPS)):
            base = base_of[number]
            if step == 0 and base in bases:
                place[number, 0] = bases[base]
                continue
            place[number, step] = len(found)
            shared = step == 0 and base_of.count(base) > 1
            if step == 0:
                bases[base] = len(found)
            label = "base" if shared or (step == 0 and len(runs) == 1) else f"{names[number]} {step}"
            found.append(Model(number, step, label, step == chosen[-1] and step > 0, shared))
    return Models(found, place)


def _base(run: RunHistory) -> str:
    model = run.config.get("model")
    return str(model.get("path")) if isinstance(model, dict) else ""
