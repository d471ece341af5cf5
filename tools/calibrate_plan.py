"""Hold the planner against published runs, and fit its rates to half of them.

    python tools/calibrate_plan.py              # fit, held-out error, ranges, and whether the shipped defaults agree
    python tools/calibrate_plan.py --markdown   # the table of the docs: predicted against published, with shipped rates
    python tools/calibrate_plan.py --effects    # how far predictions move with what sources do not print

Rows are those of `tools/data/published_runs.yaml`; nothing is downloaded, nothing needs a GPU. Of each kind the rows
are ordered by the SHA-256 of their names, and every second one is held out: the fit never sees it. Predictions are
affine in the reciprocals of rates (a step's maximum aside), so each row is planned a handful of times, and the fit is
least squares of log(published / predicted) by coordinate descent. Exit code 1 where the shipped defaults are not the
fit's.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from published_runs import PublishedRun, predicted_seconds, read_runs

from megasharp.planner.records import PART_GROUPS, SPREAD, Rates, Request

# Fitted rates; of the first five the reciprocal is what predictions are linear in.
SHARES = ("mfu", "logp_mfu", "engine_mfu", "bandwidth", "sync")
FITTED = (*SHARES, "layer_s", "driver_s")
_START = Rates(mfu=0.4, logp_mfu=0.4, engine_mfu=0.4, bandwidth=0.6, sync=1e10, layer_s=3e-5, driver_s=3.0)
# The share of held-out errors that a range holds.
_WITHIN = 0.9


def halves(runs: Iterable[PublishedRun]) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """Share out the rows that take part: to fit, and held out."""
    fit: list[PublishedRun] = []
    held_out: list[PublishedRun] = []
    inside = [run for run in runs if run.outside is None]
    for kind in dict.fromkeys(run.kind for run in inside):
        rows = sorted((run for run in inside if run.kind == kind), key=lambda run: _hash(run.name))
        fit += rows[::2]
        held_out += rows[1::2]
    return fit, held_out


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Observation:
    """One published number and what the plan says of it."""

    run: PublishedRun
    part: str
    predicted: float

    @property
    def published(self) -> float:
        """Seconds, as printed."""
        return self.run.published[self.part]

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.published - 1

    @property
    def log(self) -> float:
        """log(published / predicted)."""
        return math.log(self.published / self.predicted)


def observe(runs: Iterable[PublishedRun], rates: Rates) -> list[Observation]:
    """Predict every published number of these rows."""
    return [Observation(run, part, seconds) for run in runs for part, seconds in predicted_seconds(run, rates).items()]


# ---- the fit ------------------------------------------------------------------------------------------------------


def fit_rates(runs: Sequence[PublishedRun]) -> Rates:
    """Fit the rates to these rows: to parts where they are printed, else to the step."""
    rows = [_affine(run) for run in runs]

    def loss(logs: np.ndarray) -> float:
        return sum(float(np.sum(row.residuals(np.exp(logs)) ** 2)) for row in rows)

    logs = np.log(np.array([_unit(name, getattr(_START, name)) for name in FITTED]))
    best, size = loss(logs), 0.5
    while size > 1e-4:
        before = best
        for index in range(len(FITTED)):
            for move in (size, -size):
                tried = logs.copy()
                tried[index] += move
                if (found := loss(tried)) < best:
                    best, logs = found, tried
        if best == before:
            size /= 2
    return dataclasses.replace(
        _START, **{name: _unit(name, float(value)) for name, value in zip(FITTED, np.exp(logs), strict=True)}
    )


def _unit(name: str, value: float) -> float:
    """The number that predictions are linear in, and back."""
    return 1.0 / value if name in SHARES else value


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's parts as base + slopes @ x, x being the rates or their reciprocals; `sampling` is rollout's index."""

    published: np.ndarray
    base: np.ndarray
    slopes: np.ndarray
    overlap: bool

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """log(published / predicted) of every part; of the step alone where only that is printed."""
        parts = self.base + self.slopes @ x
        if len(self.published) == len(parts):
            return np.asarray(np.log(self.published / parts))
        # The rollout comes first.
        rest = float(np.sum(parts[1:]))
        step = max(float(parts[0]), rest) if self.overlap else float(parts[0]) + rest
        return np.asarray(np.log(self.published / step))


def _affine(run: PublishedRun) -> _Row:
    parts = [part for part in run.published if part != "step"] or ["rollout", "update", "annotate", "sync", "driver"]
    published = [seconds for part, seconds in run.published.items() if part in parts]
    asked = dataclasses.replace(run, published=dict.fromkeys(parts, 1.0))
    nothing = {name: math.inf if name in SHARES else 0.0 for name in FITTED}
    base = predicted_seconds(asked, dataclasses.replace(_START, **nothing))
    columns = []
    for name in FITTED:
        one = predicted_seconds(asked, dataclasses.replace(_START, **nothing | {name: 1.0}))
        columns.append([one[part] - base[part] for part in parts])
    overlap = run.request.engines is not None and run.request.engines.overlap
    return _Row(
        np.array(published or list(run.published.values())),
        np.array([base[part] for part in parts]),
        np.array(columns).T,
        overlap,
    )


def spreads(fit: Sequence[PublishedRun], held_out: Sequence[PublishedRun]) -> dict[str, float]:
    """Factors of the ranges by group: 90 % of held-out errors are within, each half predicted by the other's fit."""
    found = observe(held_out, fit_rates(fit)) + observe(fit, fit_rates(held_out))
    logs: dict[str, list[float]] = {}
    for one in found:
        logs.setdefault(PART_GROUPS[one.part], []).append(abs(one.log))
    return {group: math.exp(float(np.quantile(of, _WITHIN))) for group, of in logs.items()}


def without_each_model(runs: Sequence[PublishedRun]) -> list[Observation]:
    """Predict the steps of each model's RL runs by a fit that saw none of them."""
    inside = [run for run in runs if run.outside is None]
    found: list[Observation] = []
    for model in dict.fromkeys(run.request.policy.name for run in inside if run.kind == "rl"):
        left_out = [run for run in inside if run.kind == "rl" and run.request.policy.name == model]
        rates = fit_rates([run for run in inside if run not in left_out])
        found += [one for one in observe(left_out, rates) if one.part == "step"]
    return found


def rounded(rates: Rates) -> Rates:
    """The fit as it is shipped: three digits."""
    return dataclasses.replace(rates, **{name: float(f"{getattr(rates, name):.3g}") for name in FITTED})


# ---- what is printed ----------------------------------------------------------------------------------------------


def main() -> int:
    """The exit code."""
    arguments = _arguments()
    runs = read_runs()
    fit, held_out = halves(runs)
    if arguments.markdown:
        print("\n".join(markdown(fit, held_out, [run for run in runs if run.outside])))
        return 0
    if arguments.effects:
        print("\n".join(_effects(runs)))
        return 0
    found = rounded(fit_rates(fit))
    print("fitted    " + ", ".join(f"{name} {getattr(found, name):g}" for name in FITTED))
    for label, rows in (("fitted", fit), ("held out", held_out)):
        print("\n".join(_table(label, observe(rows, found))))
    ranges = {group: float(f"{factor:.3g}") for group, factor in spreads(fit, held_out).items()}
    print("ranges    " + ", ".join(f"{group} x/÷ {factor:g}" for group, factor in ranges.items()))
    errors = [abs(one.error) for one in without_each_model(runs)]
    median, worst = statistics.median(errors), max(errors)
    print(f"steps of a model that the fit saw no RL run of: median {median:.1%}, worst {worst:.1%}")
    print("\n".join(_table("outside, shown alone", observe([run for run in runs if run.outside], found))))
    agree = found == dataclasses.replace(Rates(), links=found.links, disk=found.disk) and ranges == dict(SPREAD)
    print("the shipped defaults are these" if agree else "the shipped defaults differ: records.Rates and SPREAD")
    return int(not agree)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The planner against published runs.")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    parser.add_argument("--effects", action="store_true", help="print what unprinted values would change")
    return parser.parse_args()


def summary(observations: Sequence[Observation], *, steps: bool) -> tuple[float, float]:
    """Median and worst absolute error of whole steps, or of their parts and of single parts."""
    errors = [abs(one.error) for one in observations if (one.part == "step") == steps]
    return statistics.median(errors), max(errors)


def _table(label: str, observations: Sequence[Observation]) -> Iterator[str]:
    yield ""
    for one in observations:
        yield (
            f"  {one.run.name:42}{one.part:9}{_number(one.published):>9} s  predicted {_number(one.predicted):>9} s"
            f"  {one.error:+5.0%}" + (f"  ({one.run.outside})" if one.run.outside else "")
        )
    for what, steps in (("steps", True), ("parts", False)):
        median, worst = summary(observations, steps=steps)
        yield f"  {label}, {what}: median error {median:.1%}, worst {worst:.1%}"


def _number(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def markdown(*groups: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the docs' tables: fitted rows, held-out rows, rows outside; then their sources."""
    runs: list[PublishedRun] = []
    for title, rows in zip(("Fitted", "Held out", "Outside, shown alone"), groups, strict=True):
        runs += rows
        yield from (f"### {title}", "", "| run | part | published, s | predicted, s | error |", "|---|---|---|---|---|")
        for one in observe(rows, Rates()):
            why = f" ({one.run.outside})" if one.run.outside else ""
            numbers = f"{_number(one.published)} | {_number(one.predicted)} | {one.error:+.0%}"
            yield f"| {one.run.name}{why} | {one.part} | {numbers} |"
        yield ""
    yield from ("### Sources", "")
    for url, date in dict.fromkeys((run.url, run.date) for run in sorted(runs, key=lambda run: run.name)):
        names = sorted(run.name for run in runs if (run.url, run.date) == (url, date))
        yield f"- <{url}> ({date}): {', '.join(names)}"


def _effects(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Change one assumed value at a time, and compare predictions of the step (of the part, for engines alone)."""
    by_name = {run.name: run for run in runs}
    for name, what, change in _CHANGES:
        run = by_name[name]
        before = predicted_seconds(run, Rates())
        after = predicted_seconds(dataclasses.replace(run, request=change(run.request)), Rates())
        part = "step" if "step" in before else next(iter(before))
        yield f"{name:42}{part:9}{what:44}{after[part] / before[part] - 1:+6.0%}"


def _lengths(**changes: Any) -> Callable[[Request], Request]:
    def change(request: Request) -> Request:
        lengths = dataclasses.replace(request.batch.lengths, **changes)
        return dataclasses.replace(request, batch=dataclasses.replace(request.batch, lengths=lengths))

    return change


def _without_reference(request: Request) -> Request:
    return dataclasses.replace(request, passes=dataclasses.replace(request.passes, reference=False))


def _recompute(kind: str) -> Callable[[Request], Request]:
    return lambda request: dataclasses.replace(request, split=request.split.model_copy(update={"recompute": kind}))


def _fraction(share: float) -> Callable[[Request], Request]:
    def change(request: Request) -> Request:
        assert request.engines is not None
        return dataclasses.replace(request, engines=dataclasses.replace(request.engines, memory_fraction=share))

    return change


_CHANGES: tuple[tuple[str, str, Callable[[Request], Request]], ...] = (
    ("nemo-0.4-qwen3-32b-32", "prompts of 80 tokens, not 110", _lengths(prompt=80)),
    ("nemo-0.4-qwen3-32b-32", "no pass for reference log-probs", _without_reference),
    ("nemo-0.4-qwen3-32b-32", "recompute full, not none", _recompute("full")),
    ("nemo-0.4-qwen3-32b-32", "engines with 0.5 of the GPU, not 0.6", _fraction(0.5)),
    ("nemo-0.4-llama-3.1-8b-16", "recompute none, not full", _recompute("none")),
    ("nemo-0.4-llama-3.1-8b-16", "no pass for reference log-probs", _without_reference),
    ("sglang-0.3-llama-3.1-70b-tp4", "prompts of 300 tokens, not 217", _lengths(prompt=300)),
    ("sglang-0.3-llama-3.1-70b-tp4", "the longest of 2,048 tokens, not 1,024", _lengths(response_longest=2048)),
    ("gpustack-qwen3-14b-sglang", "the longest of 2,048 tokens, not 1,024", _lengths(response_longest=2048)),
    ("verl-qwen2.5-math-7b-32-h20", "responses of 3,000 tokens, not 14,000", _lengths(response=3000)),
)

if __name__ == "__main__":
    sys.exit(main())
