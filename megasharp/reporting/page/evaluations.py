"""The part of the page that comes from evaluations and probes, in reading order:

- `choose_models`: the weights on the page, which are each run's base, its last and some between, and evaluations
  besides;
- `pass_at_k_figures`, `success_figures`: pass@k over k, and shares of problems by their share of correct samples;
- `probes`: candidates for the tokens of fixed responses that several models read (2510.14807, figures 2, 8, 9, 11 to
  16). Runs whose fixed responses are the same tokens are drawn together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from megasharp.common.errors import UserError
from megasharp.evals.estimators import mean_intervals, pass_at_k
from megasharp.evals.probe import (
    FEWEST,
    FOLDER,
    MASS,
    ProbeResponse,
    read_responses,
    read_table,
    step_file,
    token_schema,
)
from megasharp.evals.result import EvalResult
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import RunHistory
from megasharp.reporting.page.metrics import Results
from megasharp.reporting.page.records import (
    Bars,
    Model,
    ModelPoints,
    PassAtK,
    Points,
    Probe,
    ProbedModel,
    ProbeText,
    Success,
    rounded,
    share_bin,
    spread_out,
)

MOST_STEPS = 6


@dataclass(frozen=True, slots=True)
class Models:
    """The page's models, and the place of each (run, step) among them; runs from one base share step 0.

    `beside` are evaluations that belong to no run, by their place.
    """

    all: list[Model]
    place: dict[tuple[int, int], int]
    beside: dict[int, EvalResult]

    @property
    def base(self) -> int | None:
        """The first base model."""
        return next((place for place, model in enumerate(self.all) if model.run >= 0 and model.step == 0), None)

    def evaluated_on(self, suite: str, results: Results) -> dict[int, EvalResult]:
        """Return the results on a suite by model, in the models' order."""
        found: dict[int, EvalResult] = {}
        for (run, step, name), result in results.items():
            if name == suite and (run, step) in self.place:
                found.setdefault(self.place[run, step], result)
        found |= {place: result for place, result in self.beside.items() if result.suite == suite}
        return dict(sorted(found.items()))

    def suites(self, results: Results) -> list[str]:
        """Return all suites by name."""
        return sorted({suite for _, _, suite in results} | {result.suite for result in self.beside.values()})


def choose_models(
    runs: Sequence[RunHistory], names: Sequence[str], steps: Sequence[Iterable[int]], beside: Sequence[EvalResult] = ()
) -> Models:
    """Choose of each run's `steps` (with evaluations or probes) at most MOST_STEPS; step 0 is the base model."""
    found: list[Model] = []
    place: dict[tuple[int, int], int] = {}
    bases: dict[str, int] = {}
    bases_of_runs = (run.config.get("model") for run in runs)
    base_of = [str(model.get("path")) if isinstance(model, dict) else "" for model in bases_of_runs]
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
    for one in beside:
        found.append(Model(-1, one.step or 0, beside_label(one), last=True, shared=False))
    return Models(found, place, dict(zip(places, beside, strict=True)))


def beside_label(one: EvalResult) -> str:
    """Name the model of an evaluation that belongs to no run."""
    step = "" if one.step is None or str(one.step) in one.label else f" {one.step}"
    return f"{one.label}{step}, n = {one.n}"


_SEED = 0
TENTHS = 10
SHARES = ["0", *(f"to {tenth / TENTHS:g}" for tenth in range(1, TENTHS)), "below 1", "1"]


def read_results(runs: Sequence[RunHistory]) -> tuple[dict[tuple[int, int, str], EvalResult], list[str]]:
    """Read every evaluation of the runs by (run, step, suite); return a line for each that cannot be read."""
    found: dict[tuple[int, int, str], EvalResult] = {}
    problems = []
    for number, run in enumerate(runs):
        for step, path in ((step, path) for step, at in step_folders(run) for path in sorted(at.glob("*.json"))):
            try:
                result = load_result(path)
            except UserError as error:
                problems.append(str(error))
            else:
                found[number, step, result.suite] = result
    return found, problems


def step_folders(run: RunHistory) -> Iterator[tuple[int, Path]]:
    """Yield the steps after which a run was evaluated, and the folders of the results."""
    for path in sorted(run.folder.glob("evals/step_*")):
        if (step := re.fullmatch(r"step_(\d+)", path.name)) is not None:
            yield int(step[1]), path


def pass_at_k_figures(results: Results, models: Models) -> list[PassAtK]:
    """Make a figure for each suite, of the models that were evaluated on it."""
    figures = []
    for suite in models.suites(results):
        shown = models.evaluated_on(suite, results)
        if shown:
            points = [ModelPoints(model, _curve(result)) for model, result in shown.items()]
            base = models.base if models.base in shown else None
            # Each run's own step 0 on the suite: runs with other seeds drew other samples there.
            measured = {place: results.get((model.run, 0, suite)) for place, model in enumerate(models.all)}
            starts = {place: start for place, start in measured.items() if start is not None}
            changes = [] if base is None else _changes(base, shown, starts)
            figures.append(PassAtK(suite, _sampling_note(list(shown.values())), points, base, changes))
    return figures


def _changes(base: int, shown: Mapping[int, EvalResult], starts: Mapping[int, EvalResult]) -> list[ModelPoints]:
    """Return pass@k minus that of the model's start, or of the base where its run measured no start.

    Points have intervals of the mean difference over problems; there are none where the problems differ.
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
    """Return each problem's pass@k, of those with enough samples."""
    rows = [row for row in result.rows if row.samples >= max(ks, default=0)]
    return {row.id: [pass_at_k(row.samples, row.correct, k) for k in ks] for row in rows}


def _sampling_note(results: Sequence[EvalResult]) -> str:
    first = results[0]
    samples = sorted({result.n for result in results})
    n = f"{samples[0]}" if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    settings = {(each.temperature, each.top_p, each.max_tokens, each.max_turns, each.turn_tokens) for each in results}
    differ = "; they were not all sampled at the same temperature, top-p, length and turns" if len(settings) > 1 else ""
    return (
        f"{first.problems} problems, {n} samples each at temperature {first.temperature:g}; unbiased estimate, bands "
        f"are 95% intervals by resampling problems{differ}"
    )


def _curve(result: EvalResult) -> Points:
    """Return pass@k with stored intervals or, for results of older versions, with the same computed from rows."""
    ks = sorted(result.pass_at_k)
    stored = {k: result.intervals[f"pass@{k}"] for k in ks if f"pass@{k}" in result.intervals}
    if len(stored) < len(ks):
        values = [*_by_problem(result, ks).values()]
        computed = mean_intervals(np.array(values), seed=_SEED) if values else []
        stored = {k: bound for k, bound in zip(ks, computed, strict=False) if bound is not None}
    bounds = {k: [rounded(bound.low), rounded(bound.high)] for k, bound in stored.items()}
    return [[k, rounded(result.pass_at_k[k]), *bounds.get(k, [])] for k in ks]


def success_figures(results: Results, models: Models) -> list[Success]:
    """Make for each suite the shares of problems by the share of their samples that is correct."""
    figures = []
    for suite in models.suites(results):
        bars = []
        for model, result in models.evaluated_on(suite, results).items():
            places = [share_bin(row.correct, row.samples, TENTHS) for row in result.rows if row.samples]
            if places:
                shares = [rounded(places.count(place) / len(places)) for place in range(len(SHARES))]
                bars.append(Bars(models.all[model].label, models.all[model].run, model, shares))
        if bars:
            figures.append(Success(f"evaluation: {suite}", SHARES, bars))
    return figures


# The part of a probe that is on the page position by position; numbers over all tokens are of all responses.
MOST_RESPONSES, MOST_POSITIONS, MOST_CANDIDATES = 12, 160, 12
_BINS, _RANKS, _WIDTH = 20, 3, 0.05


def probed_steps(folder: Path) -> list[int]:
    """Return the steps after which a run's weights were probed."""
    found = [re.fullmatch(r"step_(\d+)", path.stem) for path in (folder / FOLDER).glob("step_*.parquet")]
    return sorted(int(match[1]) for match in found if match)


def probes(runs: Sequence[RunHistory], models: Models) -> list[Probe]:
    """Read all probes of the page. Raises UserError for a damaged file."""
    together: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    responses: dict[int, list[ProbeResponse]] = {}
    for number, run in enumerate(runs):
        found = read_responses(run.folder / FOLDER)
        if found and probed_steps(run.folder):
            responses[number] = found
            together.setdefault(tuple(one.tokens for one in found), []).append(number)
    return [_probe(numbers, responses[numbers[0]], runs, models) for numbers in together.values()]


@dataclass(slots=True)
class _Words:
    """Token texts by number, each once."""

    number: dict[str, int]

    def of(self, text: str) -> int:
        return self.number.setdefault(text, len(self.number))


def _probe(
    numbers: Sequence[int], responses: Sequence[ProbeResponse], runs: Sequence[RunHistory], models: Models
) -> Probe:
    tables: dict[int, pa.Table] = {}
    for number in numbers:
        for step in probed_steps(runs[number].folder):
            model = models.place.get((number, step))
            if model is not None and model not in tables:
                tables[model] = read_table(step_file(runs[number].folder / FOLDER, step), token_schema())
    largest = max((float(np.max(table["entropy"].to_numpy())) for table in tables.values() if len(table)), default=1.0)
    width = _WIDTH * max(1, math.ceil(largest / (_BINS * _WIDTH)))
    edges = [rounded(width * place, 4) for place in range(_BINS + 1)]
    words = _Words({})
    probed = [_model(model, table, edges, words) for model, table in sorted(tables.items())]
    tokens: dict[int, list[str]] = {}
    # All models read the same tokens: any table has their texts.
    if (table := next(iter(tables.values()), None)) is not None:
        for number, token in zip(table["response"].to_pylist(), table["token"].to_pylist(), strict=True):
            tokens.setdefault(number, []).append(token)
    texts = [
        ProbeText(one.problem, one.prompt, tokens.get(place, [])[:MOST_POSITIONS], len(one.tokens))
        for place, one in enumerate(responses[:MOST_RESPONSES])
    ]
    shown = f"{len(texts)} of {len(responses)} responses" if len(texts) < len(responses) else f"{len(texts)} responses"
    note = (
        f"{shown} sampled by the first weights that were evaluated; every model reads the same tokens, at temperature 1"
    )
    return Probe(list(numbers), note, texts, list(words.number), edges, probed)


def _model(model: int, table: pa.Table, edges: Sequence[float], words: _Words) -> ProbedModel:
    entropy = table["entropy"].to_numpy()
    logps = table["candidate_logp"].to_pylist()
    ranks = np.exp(np.array([(logp + [-np.inf] * FEWEST)[:FEWEST] for logp in logps])).reshape(-1, FEWEST)
    counts = np.histogram(np.clip(entropy, edges[0], edges[-1]), bins=edges)[0]
    cells: list[list[list[float]]] = []
    for row in table.to_pylist():
        if row["response"] >= MOST_RESPONSES:
            break
        if row["response"] == len(cells):
            cells.append([])
        if row["position"] < MOST_POSITIONS:
            cells[-1].append(_cell(row, words))
    return ProbedModel(
        model=model,
        tokens=len(table),
        mean_entropy=rounded(float(entropy.mean()) if len(table) else 0.0),
        rank_means=[rounded(float(value)) for value in ranks.mean(axis=0)],
        entropy=_shares(counts),
        rank_bins=[
            _shares(np.histogram(ranks[:, rank], bins=np.linspace(0.0, 1.0, round(1 / _WIDTH) + 1))[0])
            for rank in range(_RANKS)
        ],
        cells=cells,
    )


def _shares(counts: np.ndarray) -> list[float]:
    return [rounded(float(share)) for share in counts / max(1, counts.sum())]


def _cell(row: Mapping[str, object], words: _Words) -> list[float]:
    """Return one position: the candidates in order until they have MASS, at most MOST_CANDIDATES."""
    texts, logps, logp, rank = row["candidates"], row["candidate_logp"], row["logp"], row["rank"]
    assert isinstance(texts, list) and isinstance(logps, list) and isinstance(logp, float) and isinstance(rank, int)
    chances = np.exp(logps)
    shown = min(int((np.cumsum(chances) < MASS).sum()) + 1, MOST_CANDIDATES, len(texts))
    pairs = [(float(words.of(texts[place])), round(float(chances[place]), 3)) for place in range(shown)]
    return [round(float(np.exp(logp)), 3), float(rank), *(part for pair in pairs for part in pair)]
