"""Make the tables of the confirmatory runs as analysis.md says: `results/confirmed.md` and `results/distances.csv`.

    python examples/frontier/confirm.py

`distances.csv` has a line for each method and metric: its distance from GRPO's line at its pass@1, with the interval
over seeds and problems. docs/claims.md is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from records import (
    RESULTS,
    TEST,
    UNTRAINED,
    Run,
    counts,
    difference_text,
    method_of,
    rate_name,
    read_runs,
    tested,
    write,
)

from megasharp.evals.crossed import adjusted
from megasharp.evals.frontier import Distance, MethodRuns, distance

PRIMARY = "pass@256"
METRICS = (PRIMARY, "pass@64", "pass@16", "distinct_correct")
SEEDS = tuple(range(101, 109))
LEVEL = 0.05
# The methods of the primary test, and a described one that was followed up by these seeds alone (analysis.md).
SIX = ("casp", "iac", "dlc", "ds_sequence", "grpo_n", "gspo")
FOLLOWED = {"passk_training": (104, 105, 106, 107, 108)}
COLUMNS = (
    *("method", "setting", "seeds", "metric", "pass@1", "value", "distance", "low", "high", "p", "holm", "verdict"),
    "beyond",
)


@dataclass(frozen=True, slots=True)
class Tested:
    """A method's distance from GRPO's line in one metric; `corrected` is Holm's p-value, None where it is described."""

    method: str
    setting: str
    seeds: int
    metric: str
    y: float
    found: Distance
    corrected: float | None = None

    @property
    def verdict(self) -> str:
        """The word of analysis.md for a primary test."""
        if self.corrected is None:
            return "described"
        if self.corrected > LEVEL:
            return "not shown"
        return "confirmed" if float(self.found.crossed.difference) > 0.0 else "contradicted"


def main() -> None:
    """Write both files from the recorded runs that have test results."""
    measured = counts(TEST)
    runs = [run for run in read_runs() if run.name in measured and run.seed in SEEDS]
    found = [one for metric in METRICS for one in distances(runs, metric)]
    write(RESULTS / "distances.csv", COLUMNS, map(_line, found))
    (RESULTS / "confirmed.md").write_text(markdown(found), encoding="utf-8")


def distances(runs: Sequence[Run], metric: str) -> list[Tested]:
    """Measure each setting's distance from the line of GRPO's rates with the same seeds; correct the primary ones."""
    by_setting: dict[tuple[str, float], dict[int, str]] = {}
    for run in runs:
        by_setting.setdefault((run.setting, run.rate), {})[run.seed] = run.name
    found = []
    for (setting, rate), names in by_setting.items():
        method = method_of(setting)
        if method == "grpo":
            continue
        seeds = sorted(FOLLOWED.get(method, ()) & names.keys()) or sorted(names)
        line = _line_of_grpo(by_setting, seeds, metric)
        own = tested(setting, [names[seed] for seed in seeds], metric)
        one = distance(own, line) if len(line) > 1 else None
        if one is not None:
            shown = f"{setting}, {rate_name(rate)}"
            found.append(Tested(method, shown, len(seeds), metric, own.point[1], one))
    return corrected(found) if metric == PRIMARY else found


def _line_of_grpo(
    by_setting: Mapping[tuple[str, float], Mapping[int, str]], seeds: Sequence[int], metric: str
) -> list[MethodRuns]:
    """The untrained model and GRPO's rates, those that all of `seeds` have."""
    sides = [(UNTRAINED, {seed: f"{UNTRAINED}_s{seed}" for seed in seeds})]
    sides += [(rate_name(rate), dict(names)) for (setting, rate), names in by_setting.items() if setting == "grpo"]
    return [
        tested(name, [names[seed] for seed in seeds], metric)
        for name, names in sides
        if all(seed in names for seed in seeds)
    ]


def corrected(found: Sequence[Tested]) -> list[Tested]:
    """Correct the p-values of the six that have all seeds, by Holm; a follow-up is a test of its own."""
    p_values = [float(one.found.crossed.p_value()) for one in found]
    of_the_six = [one.method in SIX and one.seeds == len(SEEDS) for one in found]
    holm = adjusted([p if six else None for p, six in zip(p_values, of_the_six, strict=True)])
    return [
        replace(one, corrected=float(corrected_p) if six else p)
        if six or one.seeds == len(FOLLOWED.get(one.method, ()))
        else one
        for one, six, p, corrected_p in zip(found, of_the_six, p_values, holm, strict=True)
    ]


def _line(one: Tested) -> tuple[object, ...]:
    interval = one.found.crossed.interval()
    numbers = (one.found.x, one.y, float(one.found.crossed.difference), interval.low, interval.high)
    p = float(one.found.crossed.p_value())
    holm = "" if one.corrected is None else f"{one.corrected:.4g}"
    texts = (f"{number:.5f}" for number in numbers)
    return one.method, one.setting, one.seeds, one.metric, *texts, f"{p:.4g}", holm, one.verdict, one.found.beyond


def markdown(found: Sequence[Tested]) -> str:
    """Format a table: a row for each setting, a column for each metric's value and distance."""
    by_setting: dict[str, dict[str, Tested]] = {}
    for one in found:
        by_setting.setdefault(one.setting, {})[one.metric] = one
    heads = ["", "seeds", "pass@1", *(f"{metric}<br>minus the line" for metric in METRICS), "Holm's p", "verdict"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for setting, metrics in by_setting.items():
        primary = metrics[PRIMARY]
        cells = [f"`{setting}`", str(primary.seeds), f"{primary.found.x:.3f}" + (" +" if primary.found.beyond else "")]
        cells += [_cell(metrics.get(metric)) for metric in METRICS]
        cells += ["" if primary.corrected is None else f"{primary.corrected:.3f}", primary.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Tested | None) -> str:
    if one is None:
        return "below the untrained model's pass@1"
    return f"{one.y:.3f}<br>{difference_text(one.found.crossed)}"


if __name__ == "__main__":
    main()
