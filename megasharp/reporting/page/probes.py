"""The candidates of fixed responses, as models read them one after the other (2510.14807, figures 2, 8, 9, 11 to 16).

Runs whose responses are the same tokens are drawn together; others get a part of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from megasharp.evals.probe import FEWEST, FOLDER, MASS, SCHEMA, ProbeResponse, read_responses, read_table, step_file
from megasharp.reporting.history import RunHistory
from megasharp.reporting.page.evaluations import Models
from megasharp.reporting.page.records import Probe, ProbedModel, ProbeText, rounded

# What of a probe is on the page, position by position; figures over all tokens are of all responses.
MOST_RESPONSES, MOST_POSITIONS, MOST_CANDIDATES = 12, 160, 12
_BINS, _RANKS, _WIDTH = 20, 3, 0.05


def probed_steps(folder: Path) -> list[int]:
    """The steps after which a run's weights were probed."""
    found = [re.fullmatch(r"step_(\d+)", path.stem) for path in (folder / FOLDER).glob("step_*.parquet")]
    return sorted(int(match[1]) for match in found if match)


def probes(runs: Sequence[RunHistory], models: Models) -> list[Probe]:
    """All probes of the page. Raises UserError for a damaged file."""
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
                tables[model] = read_table(step_file(runs[number].folder / FOLDER, step), SCHEMA)
    largest = max((float(np.max(table["entropy"].to_numpy())) for table in tables.values() if len(table)), default=1.0)
    width = _WIDTH * max(1, math.ceil(largest / (_BINS * _WIDTH)))
    edges = [rounded(width * place, 4) for place in range(_BINS + 1)]
    words = _Words({})
    probed = [_model(model, table, edges, words) for model, table in sorted(tables.items())]
    texts = _texts(responses, next(iter(tables.values()), None))
    shown = f"{len(texts)} of {len(responses)} responses" if len(texts) < len(responses) else f"{len(texts)} responses"
    note = (
        f"{shown} sampled by the first weights that were evaluated; every model reads the same tokens, at temperature 1"
    )
    return Probe(list(numbers), note, texts, list(words.number), edges, probed)


def _texts(responses: Sequence[ProbeResponse], table: pa.Table | None) -> list[ProbeText]:
    tokens: dict[int, list[str]] = {}
    if table is not None:
        for number, token in zip(table["response"].to_pylist(), table["token"].to_pylist(), strict=True):
            tokens.setdefault(number, []).append(token)
    return [
        ProbeText(one.problem, one.prompt, tokens.get(place, [])[:MOST_POSITIONS], len(one.tokens))
        for place, one in enumerate(responses[:MOST_RESPONSES])
    ]


def _model(model: int, table: pa.Table, edges: Sequence[float], words: _Words) -> ProbedModel:
    entropy = table["entropy"].to_numpy()
    logps = table["candidate_logp"].to_pylist()
    ranks = np.exp(np.array([(logp + [-np.inf] * FEWEST)[:FEWEST] for logp in logps])).reshape(-1, FEWEST)
    counts = np.histogram(np.clip(entropy, edges[0], edges[-1]), bins=edges)[0]
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
        cells=_cells(table, words),
    )


def _shares(counts: np.ndarray) -> list[float]:
    return [rounded(float(share)) for share in counts / max(1, counts.sum())]


def _cells(table: pa.Table, words: _Words) -> list[list[list[float]]]:
    cells: list[list[list[float]]] = []
    for row in table.to_pylist():
        if row["response"] >= MOST_RESPONSES:
            break
        if row["response"] == len(cells):
            cells.append([])
        if row["position"] < MOST_POSITIONS:
            cells[-1].append(_cell(row, words))
    return cells


def _cell(row: Mapping[str, object], words: _Words) -> list[float]:
    """The candidates in order until they hold MASS, at most MOST_CANDIDATES."""
    texts, logps, logp, rank = row["candidates"], row["candidate_logp"], row["logp"], row["rank"]
    assert isinstance(texts, list) and isinstance(logps, list) and isinstance(logp, float) and isinstance(rank, int)
    chances = np.exp(logps)
    shown = min(int((np.cumsum(chances) < MASS).sum()) + 1, MOST_CANDIDATES, len(texts))
    pairs = [(float(words.of(texts[place])), round(float(chances[place]), 3)) for place in range(shown)]
    return [round(float(np.exp(logp)), 3), float(rank), *(part for pair in pairs for part in pair)]
