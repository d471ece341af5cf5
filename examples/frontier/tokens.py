"""Make the table of methods after equal sampled tokens: `results/tokens.md`.

    python examples/frontier/tokens.py

pass@1 and pass@64 on the development problems, between two evaluations by interpolation, and the distance from the line
that GRPO's rates draw after as many tokens, the same seeds on both sides. Intervals are t intervals over seeds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from confirm import FOLLOWED, SEEDS
from records import RESULTS, Run, grouped, read_runs, t_test

from megasharp.evals.frontier import Values, upper_hull

TOKENS = (200_000, 400_000)
KEYS = ("pass@1", "pass@64")
HEADS = ("pass@1 / pass@64", "pass@64 minus the line")


def main() -> None:
    """Write the table."""
    runs = [run for run in read_runs() if run.seed in FOLLOWED.get(run.method, SEEDS)]
    heads = ["", "seeds", *(f"{tokens // 1000:,},000 tokens: {what}" for tokens in TOKENS for what in HEADS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    grpo = [run for run in runs if run.method == "grpo"]
    for name, own in grouped(run for run in runs if run.method != "grpo").items():
        seeds = {run.seed for run in own}
        same = [run for run in grpo if run.seed in seeds]
        cells = [cell for tokens in TOKENS for cell in _cells(own, _line(same, tokens), tokens)]
        lines.append(f"| `{name}` | {len(own)} | {' | '.join(cells)} |")
    (RESULTS / "tokens.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(grpo: Sequence[Run], tokens: int) -> list[Values]:
    """Return the vertices of the line of GRPO's rates, [seeds, 2] each."""
    sides = [after(each, tokens) for each in grouped(grpo).values()]
    hull = upper_hull([tuple(side.mean(axis=0)) for side in sides])
    return sorted((side for side in sides if tuple(side.mean(axis=0)) in hull), key=lambda side: side[:, 0].mean())


def after(runs: Sequence[Run], tokens: int) -> Values:
    """Return pass@1 and pass@64 of runs after this many sampled tokens, [seeds, 2]."""
    return np.array(
        [
            [
                np.interp(tokens, [line["tokens"] for line in run.curve], [line[key] for line in run.curve])
                for key in KEYS
            ]
            for run in runs
        ]
    )


def _cells(own: Sequence[Run], line: Sequence[Values], tokens: int) -> tuple[str, str]:
    side = after(own, tokens)
    x, y = side.mean(axis=0)
    point = f"{x:.3f} / {y:.3f}"
    ends = next(((a, b) for a, b in pairwise(line) if a[:, 0].mean() <= x <= b[:, 0].mean()), None)
    if ends is None:
        return point, "pass@1 outside of the line"
    a, b = ends
    weight = (b[:, 0].mean() - x) / (b[:, 0].mean() - a[:, 0].mean())
    between = weight * a + (1.0 - weight) * b
    slope = (b[:, 1].mean() - a[:, 1].mean()) / (b[:, 0].mean() - a[:, 0].mean())
    mean, half, _ = t_test(side[:, 1] - between[:, 1] - slope * (side[:, 0] - between[:, 0]))
    return point, f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


if __name__ == "__main__":
    main()
