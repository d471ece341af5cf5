"""Make the tables of examples/maze/strategies.md from its recorded runs.

    python examples/frontier/mazes.py

Writes `examples/maze/strategies/differences.csv` and `tables.md` beside it: pass@64 and the distinct shortest ways that
64 walks find, with intervals over seeds and mazes. GRPO stands less the untrained model, the others less GRPO's line at
equal pass@1, and at GRPO's highest rate less GRPO there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from records import UNTRAINED, counts, difference_text, method_runs, write

from megasharp.evals.crossed import Crossed, adjusted, crossed
from megasharp.evals.frontier import MethodRuns, distance

STRATEGIES = Path(__file__).parents[1] / "maze" / "strategies"
TEST = "maze_test"
WAYS = "distinct_correct"
METRICS = (WAYS, "pass@64")
LINE = "GRPO's line"
FAST = "grpo-lr0.0002"
# Right walks of 64 in a maze, from which a single way says something.
OFTEN = 10
COLUMNS = ("case", "against", "metric", "seeds", "pass@1", "value", "difference", "low", "high", "p", "holm")
Rows = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A method's runs on a metric, and their difference from `against`, None where there is none; Holm's p-value."""

    method: str
    against: str
    metric: str
    runs: MethodRuns
    difference: Crossed | None
    holm: float | None = None


def main() -> None:
    """Write both files."""
    by_method: dict[str, dict[str, Mapping[str, str]]] = {}
    for run, line in sorted(counts(TEST, folder=STRATEGIES).items()):
        method, _, seed = run.rpartition("_s")
        by_method.setdefault(method, {})[seed] = line
    questions = (collapse, distances, kept)
    found = [one for metric in METRICS for question in questions for one in question(by_method, metric)]
    write(STRATEGIES / "differences.csv", COLUMNS, map(_line, found))
    (STRATEGIES / "tables.md").write_text(_table(found, by_method), encoding="utf-8")


def collapse(by_method: Rows, metric: str) -> list[Compared]:
    """Hold GRPO's rates against the untrained model, which stands first."""
    base = _runs(by_method, UNTRAINED, sorted(by_method[UNTRAINED]), metric)
    found = [Compared(UNTRAINED, "", metric, base, None)]
    for method in sorted(filter(_is_grpo, by_method), key=lambda name: float(name.removeprefix("grpo-lr"))):
        seeds = sorted(by_method[method])
        own, base = (_runs(by_method, each, seeds, metric) for each in (method, UNTRAINED))
        found.append(Compared(method, UNTRAINED, metric, own, crossed(base.y_RP, own.y_RP, paired=True)))
    return corrected(found)


def distances(by_method: Rows, metric: str) -> list[Compared]:
    """Hold the others against the line through the untrained model and GRPO's rates; at the highest rate, described."""
    sides = [UNTRAINED, *filter(_is_grpo, by_method)]

    def one(method: str) -> Compared:
        seeds = sorted(by_method[method])
        own = _runs(by_method, method, seeds, metric)
        found = distance(own, [_runs(by_method, side, seeds, metric) for side in sides])
        return Compared(method, LINE, metric, own, None if found is None else found.crossed)

    others = [method for method in by_method if method not in sides]
    planned = [one(method) for method in others if not _is_fast(method)]
    return [*corrected(planned), *(one(method) for method in others if _is_fast(method))]


def kept(by_method: Rows, metric: str) -> list[Compared]:
    """Hold the others at GRPO's highest rate against GRPO there."""
    found = []
    for method in filter(_is_fast, by_method):
        seeds = sorted(by_method[method])
        own, grpo = (_runs(by_method, each, seeds, metric) for each in (method, FAST))
        found.append(Compared(method, FAST, metric, own, crossed(grpo.y_RP, own.y_RP, paired=True)))
    return corrected(found)


def _is_grpo(method: str) -> bool:
    return method.startswith("grpo")


def _is_fast(method: str) -> bool:
    return method.endswith("_fast")


def _runs(by_method: Rows, method: str, seeds: Sequence[str], metric: str) -> MethodRuns:
    return method_runs(method, [by_method[method][seed] for seed in seeds], metric)


def corrected(found: Sequence[Compared]) -> list[Compared]:
    """Correct p-values of the ways found, which the plan tests; pass@64 is described."""
    p_values = [
        float(one.difference.p_value()) if one.difference is not None and one.metric == WAYS else None for one in found
    ]
    holm = map(float, adjusted(p_values))
    return [one if p is None else replace(one, holm=value) for one, p, value in zip(found, p_values, holm, strict=True)]


def _line(one: Compared) -> tuple[object, ...]:
    head = (one.method, one.against, one.metric, len(one.runs.x_RP), *(f"{number:.5f}" for number in one.runs.point))
    if one.difference is None:
        return *head, "", "", "", "", ""
    interval = one.difference.interval()
    numbers = (float(one.difference.difference), interval.low, interval.high)
    holm = "" if one.holm is None else f"{one.holm:.4g}"
    return *head, *(f"{number:.5f}" for number in numbers), f"{float(one.difference.p_value()):.4g}", holm


def ways_by_maze(lines: Iterable[Mapping[str, str]], at_least: int) -> list[int]:
    """Return the ways found in each maze that has so many right walks, for each of the runs."""
    return [
        int(ways)
        for line in lines
        for correct, ways in zip(line["correct"].split(), line[WAYS].split(), strict=True)
        if int(correct) >= at_least
    ]


def _table(found: Sequence[Compared], by_method: Rows) -> str:
    names = "seeds", "pass@1", "ways found", "less", "", "Holm's p", "in solved mazes", "one way alone", "pass@64", ""
    heads = ["", *names]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for ways in (one for one in found if one.metric == WAYS):
        others = next(
            one for one in found if (one.method, one.against, one.metric) == (ways.method, ways.against, "pass@64")
        )
        x, y = ways.runs.point
        cells = [f"`{ways.method}`", str(len(ways.runs.x_RP)), f"{x:.3f}", f"{y:.2f}", ways.against, _text(ways)]
        p_value = "" if ways.holm is None else "<0.001" if ways.holm < 0.0005 else f"{ways.holm:.3f}"
        lines_of = by_method[ways.method].values()
        solved, often = ways_by_maze(lines_of, 1), ways_by_maze(lines_of, OFTEN)
        shares = [f"{sum(solved) / len(solved):.2f}", f"{often.count(1)} of {len(often)}"]
        cells += [p_value, *shares, f"{others.runs.point[1]:.3f}", _text(others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _text(one: Compared) -> str:
    return "" if one.difference is None else difference_text(one.difference)


if __name__ == "__main__":
    main()
