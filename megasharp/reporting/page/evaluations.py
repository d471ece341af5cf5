"""pass@k over k, and how often each problem is solved, from the evaluations of runs.

Which weights the page speaks of: each run's base, its last, and some between; and what was evaluated besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megasharp.common.errors import UserError
from megasharp.evals.estimators import mean_intervals, pass_at_k
from megasharp.evals.files import load_result
from megasharp.evals.result import EvalResult
from megasharp.reporting.history import RunHistory
from megasharp.reporting.page.metrics import Results
from megasharp.reporting.page.records import Bars, Model, ModelPoints, PassAtK, Points, Success, rounded, spread_out

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


_SEED = 0
SHARES = ["0", *(f"to {tenth / 10:g}" for tenth in range(1, 10)), "below 1", "1"]


def read_results(runs: Sequence[RunHistory]) -> tuple[dict[tuple[int, int, str], EvalResult], list[str]]:
    """Every evaluation of the runs by (run, step, suite), and a line for each that cannot be read."""
    found: dict[tuple[int, int, str], EvalResult] = {}
    problems = []
    for number, run in enumerate(runs):
        for path in sorted(run.folder.glob("evals/step_*/*.json")):
            step = re.fullmatch(r"step_(\d+)", path.parent.name)
            if step is None:
                continue
            try:
                result = load_result(path)
            except UserError as error:
                problems.append(str(error))
            else:
                found[number, int(step[1]), result.suite] = result
    return found, problems


def pass_at_k_figures(results: Results, models: Models) -> list[PassAtK]:
    """A figure for each suite, of the models that were evaluated on it."""
    figures = []
    for suite in models.suites(results):
        shown = models.evaluated_on(suite, results)
        if shown:
            points = [ModelPoints(model, _curve(result)) for model, result in shown.items()]
            base = models.base if models.base in shown else None
            changes = [] if base is None else _changes(base, shown, _starts(models, results, suite))
            figures.append(PassAtK(suite, _how(list(shown.values())), points, base, changes))
    return figures


def _starts(models: Models, results: Results, suite: str) -> dict[int, EvalResult]:
    """By model, what its own run measured before its first step: runs with other seeds drew other samples there."""
    starts = {place: results.get((model.run, 0, suite)) for place, model in enumerate(models.all)}
    return {place: start for place, start in starts.items() if start is not None}


def _changes(base: int, shown: Mapping[int, EvalResult], starts: Mapping[int, EvalResult]) -> list[ModelPoints]:
    """pass@k less that of the model's start, which is the base's where its run measured none.

    With intervals of the mean difference over problems; of other problems nothing.
    """
    found = []
    for model in sorted(shown.keys() - {base}):
        start = starts.get(model, shown[base])
        ks = sorted(start.pass_at_k.keys() & shown[model].pass_at_k.keys())
        before, after = (_by_problem(one, ks) for one in (start, shown[model]))
        if ks and before and before.keys() == after.keys():
            differences = np.array([after[problem] for problem in before]) - np.array([*before.values()])
            bounds = mean_intervals(differences, seed=_SEED)
            means = differences.mean(axis=0)
            points = [
                [float(k), rounded(float(mean)), *([rounded(bound.low), rounded(bound.high)] if bound else [])]
                for k, mean, bound in zip(ks, means, bounds, strict=True)
            ]
            found.append(ModelPoints(model, points))
    return found


def _by_problem(result: EvalResult, ks: Sequence[int]) -> dict[str, list[float]]:
    """Each problem's pass@k, of those with enough samples."""
    rows = [row for row in result.rows if row.samples >= max(ks, default=0)]
    return {row.id: [pass_at_k(row.samples, row.correct, k) for k in ks] for row in rows}


def _how(results: Sequence[EvalResult]) -> str:
    first = results[0]
    samples = sorted({result.n for result in results})
    n = f"{samples[0]}" if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    settings = {(result.temperature, result.top_p, result.max_tokens) for result in results}
    differ = "; they were not all sampled at the same temperature, top-p and length" if len(settings) > 1 else ""
    return (
        f"{first.problems} problems, {n} samples each at temperature {first.temperature:g}; unbiased estimate, bands "
        f"are 95% intervals by resampling problems{differ}"
    )


def _curve(result: EvalResult) -> Points:
    ks = sorted(result.pass_at_k)
    bounds = _bounds(result, ks)
    return [[k, rounded(result.pass_at_k[k]), *bounds[k]] for k in ks]


def _bounds(result: EvalResult, ks: Sequence[int]) -> dict[int, list[float]]:
    """Stored intervals, or, for results of older versions, the same computed from their rows."""
    stored = {k: result.intervals[f"pass@{k}"] for k in ks if f"pass@{k}" in result.intervals}
    if len(stored) < len(ks):
        values = [*_by_problem(result, ks).values()]
        computed = mean_intervals(np.array(values), seed=_SEED) if values else []
        stored = {k: bound for k, bound in zip(ks, computed, strict=False) if bound is not None}
    return {k: [rounded(stored[k].low), rounded(stored[k].high)] if k in stored else [] for k in ks}


def success_figures(results: Results, models: Models) -> list[Success]:
    """For each suite, the shares of problems by the share of their samples that is correct."""
    figures = []
    for suite in models.suites(results):
        bars = []
        for model, result in models.evaluated_on(suite, results).items():
            places = [share_bin(row.correct, row.samples) for row in result.rows if row.samples]
            if places:
                shares = [rounded(places.count(place) / len(places)) for place in range(len(SHARES))]
                bars.append(Bars(models.all[model].label, models.all[model].run, model, shares))
        if bars:
            figures.append(Success(f"evaluation: {suite}", SHARES, bars))
    return figures


def share_bin(correct: int, samples: int) -> int:
    """The place in SHARES: none, up to 0.1, ..., up to 0.9, less than all, all; in whole numbers, so exactly."""
    if correct in (0, samples):
        return 0 if correct == 0 else len(SHARES) - 1
    return min(-(-10 * correct // samples), len(SHARES) - 2)
