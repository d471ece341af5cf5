"""Which weights the page speaks of: each run's base, its last, and some between; and what was evaluated besides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megasharp.evals.result import EvalResult
from megasharp.report.page.figures import Results
from megasharp.report.page.records import Model
from megasharp.report.page.sampling import spread_out
from megasharp.runs.history import RunHistory

MOST_STEPS = 6


@dataclass(frozen=True, slots=True)
class Models:
    """The page's models, and where (run, step) is among them; runs from one base have step 0 in common.

    `beside` are evaluations that are no run's, by their place.
    """

    all: list[Model]
    place: dict[tuple[int, int], int]
    beside: dict[int, EvalResult]

    @property
    def base(self) -> int | None:
        """The first base model."""
        return next((place for place, model in enumerate(self.all) if model.run >= 0 and model.step == 0), None)

    def evaluated_on(self, suite: str, results: Results) -> dict[int, EvalResult]:
        """The results on a suite by model, in the models' order."""
        found: dict[int, EvalResult] = {}
        for (run, step, name), result in results.items():
            if name == suite and (run, step) in self.place:
                found.setdefault(self.place[run, step], result)
        found |= {place: result for place, result in self.beside.items() if result.suite == suite}
        return dict(sorted(found.items()))

    def suites(self, results: Results) -> list[str]:
        """All suites by name."""
        return sorted({suite for _, _, suite in results} | {result.suite for result in self.beside.values()})


def choose_models(
    runs: Sequence[RunHistory], names: Sequence[str], steps: Sequence[Iterable[int]], beside: Sequence[EvalResult] = ()
) -> Models:
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
    places = range(len(found), len(found) + len(beside))
    found += [Model(-1, one.step or 0, _label(one), last=True, shared=False) for one in beside]
    return Models(found, place, dict(zip(places, beside, strict=True)))


def _label(result: EvalResult) -> str:
    step = "" if result.step is None or str(result.step) in result.label else f" {result.step}"
    return f"{result.label}{step}, n = {result.n}"


def _base(run: RunHistory) -> str:
    model = run.config.get("model")
    return str(model.get("path")) if isinstance(model, dict) else ""
