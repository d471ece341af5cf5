"""A sweep's rows at equal pass@1: how far each lies above the line that other rows draw (`evals.frontier`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megasharp.evals.estimators import by_suite
from megasharp.evals.frontier import Distance, MethodRuns, distance

# The metric at which rows are compared.
MATCHED = "pass@1"
# A row's runs by seed: metrics by name, [problems] each.
SeededRuns = Mapping[int, Mapping[str, NDArray[np.float64]]]


def above_line(
    rows: Mapping[str, SeededRuns], line: Sequence[str], metric: str, sizes: Sequence[int] = ()
) -> dict[str, tuple[int, Distance | None]]:
    """Measure the rows that are not of the line, by name: the seeds that all have, their number, and the distance.

    Problems that a run left out are left out of all. None where a row cannot be matched (`evals.frontier.distance`).
    `sizes`: numbers of problems of several suites whose means are averaged.
    """
    found: dict[str, tuple[int, Distance | None]] = {}
    for name in (name for name in rows if name not in line):
        sides = [name, *line]
        seeds = sorted(set.intersection(*(set(rows[side]) for side in sides)))
        if len(seeds) < 2:
            found[name] = len(seeds), None
            continue
        # Both metrics, of every side, run and problem.
        values = np.array(
            [[[rows[side][seed][each] for seed in seeds] for side in sides] for each in (MATCHED, metric)]
        )
        known_P = ~np.isnan(values).any(axis=(0, 1, 2))
        left = tuple(int(part.sum()) for part in by_suite(known_P.astype(np.float64), sizes))
        x, y = values[..., known_P]
        own, *others = (MethodRuns(*each, left) for each in zip(sides, x, y, strict=True))
        found[name] = len(seeds), distance(own, others) if min(left) else None
    return found
