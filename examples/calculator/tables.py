"""Print the tables of this example's README from the recorded runs, `runs.csv` and `calls.csv`.

python examples/calculator/tables.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent


def main() -> None:
    """Print means over seeds, of pass@1 with the lowest and the highest seed, and what became of the calls."""
    print("| tool | step | pass@1 | pass@4 | pass@16 |\n|---|---|---|---|---|")
    for (tool, step), runs in grouped("runs.csv", "tool", "step"):
        ones, fours, sixteens = ([float(run[f"pass@{k}"]) for run in runs] for k in (1, 4, 16))
        spread = f"({min(ones):.3f} to {max(ones):.3f})"
        print(f"| {tool} | {step} | {fmean(ones):.3f} {spread} | {fmean(fours):.3f} | {fmean(sixteens):.3f} |")
    print("\n| steps | responses that call | calls a response | with a call that meets the target | of these right |")
    print("|---|---|---|---|---|")
    for (first, last), runs in grouped("calls.csv", "first_step", "last_step"):
        names = ("responses", "calls", "with_call", "with_call_at_target", "right_of_these")
        responses, calls, with_call, met, right = (sum(int(run[name]) for run in runs) for name in names)
        shares = f"{calls / responses:.1f} | {met / responses:.0%} | {right / met:.0%}"
        print(f"| {first} to {last} | {with_call / responses:.0%} | {shares} |")


def grouped(file: str, *keys: str) -> Iterator[tuple[tuple[str, ...], Sequence[Mapping[str, str]]]]:
    """The lines of a file, all seeds of one kind together, in the order of the kinds."""

    def kind(line: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(line[key] for key in keys)

    with (HERE / file).open(newline="") as stream:
        lines = sorted(csv.DictReader(stream), key=lambda line: [(key.isdigit(), key.zfill(9)) for key in kind(line)])
    for found, group in groupby(lines, key=kind):
        yield found, [*group]


if __name__ == "__main__":
    main()
