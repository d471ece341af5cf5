"""Make the tables of the stratified comparison (examples/solution_multiplicity/stratified.md) from its recorded runs.

    python examples/frontier/strata.py

Reads the folders of `examples/solution_multiplicity/strata/`; writes `changes.csv` (each method less GRPO and less the
untrained model, by stratum), `contrasts.csv` (most solutions less one solution) and what is less GRPO as `tables.md`
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from records import UNTRAINED, difference_text, table, values, write

from megasharp.evals.crossed import Crossed, adjusted, crossed
from megasharp.evals.frontier import Values

STRATA_RESULTS = Path(__file__).parents[1] / "solution_multiplicity" / "strata"
# Distinct solutions of a problem, by the names of folders.
STRATA = {"1": "1", "2_to_3": "2 to 3", "4_to_8": "4 to 8", "over_8": "more than 8"}
BASELINE = "grpo"
PRIMARY = "pass@8"
METRICS = ("pass@1", PRIMARY, "pass@64")
# Those that stratified.md tests; the others are described.
TESTED = ("bonus-coefficient0.01", "bonus-coefficient0.03", "penalty-coefficient0.01")
CHANGES = ("solutions", "case", "against", "metric", "seeds", "value", "difference", "low", "high")
CONTRASTS = ("case", "metric", "difference", "low", "high", "p", "holm")


@dataclass(frozen=True, slots=True)
class Change:
    """A method's mean in one stratum, and its change against another; None where that is itself."""

    stratum: str
    method: str
    against: str
    metric: str
    seeds: int
    value: float
    crossed: Crossed | None


def main() -> None:
    """Write the three files."""
    by_stratum = [one for stratum in STRATA for metric in METRICS for one in changes(stratum, metric)]
    found = [one for one in by_stratum if one.against == BASELINE]
    contrasts = {metric: contrast(found, metric) for metric in METRICS}
    write(STRATA_RESULTS / "changes.csv", CHANGES, [_change_line(one) for one in by_stratum if one.crossed is not None])
    rows = [line for metric, each in contrasts.items() for line in _contrast_lines(metric, each)]
    write(STRATA_RESULTS / "contrasts.csv", CONTRASTS, rows)
    text = f"{_changes_table(found)}\n{_contrasts_table(contrasts)}"
    (STRATA_RESULTS / "tables.md").write_text(text, encoding="utf-8")


def changes(stratum: str, metric: str) -> list[Change]:
    """Hold each method of a stratum against GRPO and the untrained model, with pairs by seed."""
    counts = {line["run"]: line for line in table("counts", STRATA_RESULTS / stratum)}
    by_method: dict[str, dict[str, Values]] = {}
    for run, line in sorted(counts.items()):
        method, _, seed = run.rpartition("_s")
        by_method.setdefault(method, {})[seed] = values([line], metric)[0]
    found = []
    for against in (BASELINE, UNTRAINED):
        for method in (UNTRAINED, BASELINE, *sorted(by_method.keys() - {UNTRAINED, BASELINE})):
            own, other = by_method[method], by_method[against]
            pairs = sorted(own.keys() & other.keys())
            change = None
            # The untrained model stands in the table of what is less GRPO by its value alone.
            if method not in (against, UNTRAINED):
                change = crossed(_stack(other, pairs), _stack(own, pairs), paired=True)
            mean = float(_stack(own, sorted(own)).mean())
            found.append(Change(stratum, method, against, metric, len(own), mean, change))
    return found


def _stack(by_seed: Mapping[str, Values], seeds: Sequence[str]) -> Values:
    return np.stack([by_seed[seed] for seed in seeds])


def contrast(found: Sequence[Change], metric: str) -> dict[str, Crossed]:
    """Return by method its change with most solutions less its change with one."""
    most, one = (
        {each.method: each.crossed for each in found if (each.stratum, each.metric) == (stratum, metric)}
        for stratum in ("over_8", "1")
    )
    both = {method: (above, one.get(method)) for method, above in most.items()}
    return {method: above.less(below) for method, (above, below) in both.items() if above and below}


def holm(contrasts: Mapping[str, Crossed], metric: str) -> dict[str, float]:
    """Return Holm's p-values of the methods that are tested."""
    tested = [method for method in TESTED if method in contrasts and metric == PRIMARY]
    p_values = adjusted([float(contrasts[method].p_value()) for method in tested])
    return dict(zip(tested, map(float, p_values), strict=True))


def _change_line(one: Change) -> tuple[object, ...]:
    assert one.crossed is not None
    head = (STRATA[one.stratum], one.method, one.against, one.metric, one.seeds, f"{one.value:.5f}")
    interval = one.crossed.interval()
    return *head, *(f"{number:.5f}" for number in (float(one.crossed.difference), interval.low, interval.high))


def _contrast_lines(metric: str, contrasts: Mapping[str, Crossed]) -> list[tuple[object, ...]]:
    corrected = holm(contrasts, metric)
    lines: list[tuple[object, ...]] = []
    for method, one in contrasts.items():
        interval = one.interval()
        numbers = (f"{number:.5f}" for number in (float(one.difference), interval.low, interval.high))
        p = f"{corrected[method]:.4g}" if method in corrected else ""
        lines.append((method, metric, *numbers, f"{float(one.p_value()):.4g}", p))
    return lines


def _changes_table(found: Sequence[Change]) -> str:
    lines = [f"| solutions | | seeds | {' | '.join(METRICS)} |", "|---" * (3 + len(METRICS)) + "|"]
    rows: dict[tuple[str, str], dict[str, Change]] = {}
    for one in found:
        rows.setdefault((one.stratum, one.method), {})[one.metric] = one
    for (stratum, method), by_metric in rows.items():
        cells = " | ".join(
            f"{one.value:.3f}" if one.crossed is None else difference_text(one.crossed) for one in by_metric.values()
        )
        lines.append(f"| {STRATA[stratum]} | `{method}` | {by_metric[PRIMARY].seeds} | {cells} |")
    return "\n".join(lines) + "\n"


def _contrasts_table(contrasts: Mapping[str, Mapping[str, Crossed]]) -> str:
    lines = [f"| | {' | '.join(METRICS)} | Holm's p, {PRIMARY} |", "|---" * (2 + len(METRICS)) + "|"]
    corrected = holm(contrasts[PRIMARY], PRIMARY)
    for method in contrasts[PRIMARY]:
        cells = [difference_text(contrasts[metric][method]) for metric in METRICS]
        cells.append(f"{corrected[method]:.3f}" if method in corrected else "described")
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
