"""Print what tuning goes by (analysis.md): the area of each setting beside GRPO's frontier of the same seed.

    python examples/frontier/tuning.py

Areas are in units of 1e-4, of all learning rates of a setting together and of each alone, with its last point. With
both seeds, each setting's learning rate for the confirmation follows from the last points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from records import Point, Run, read_runs, untrained_point

from megasharp.evals.frontier import area_above, upper_hull

SEEDS = (11, 12)
LEAST_RATE = 2.5e-5


class Baseline:
    """GRPO's frontier of one tuning seed, over all of its rates."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.start = untrained_point(runs)
        self.points = [point for run in runs if run.method == "grpo" for point in run.points]
        self.line = upper_hull([self.start, *self.points])

    def area(self, runs: Sequence[Run]) -> float:
        """Return the area between the frontier of `runs` and GRPO's."""
        return area_above([point for run in runs for point in run.points], self.points, self.start)

    def height(self, point: Point) -> float:
        """Return how high a point lies above GRPO's frontier, whose last value holds beyond it."""
        return point[1] - float(np.interp(point[0], *zip(*self.line, strict=True)))


def main() -> None:
    """Print areas by setting: each seed's, and the mean over seeds where both have all of a setting's rates."""
    runs = read_runs()
    known = {seed: [run for run in runs if run.seed == seed] for seed in SEEDS}
    baselines = {seed: Baseline(ours) for seed, ours in known.items() if any(run.method == "grpo" for run in ours)}
    for seed, baseline in baselines.items():
        print(f"seed {seed}: GRPO's frontier " + ", ".join(f"({x:.3f}, {y:.3f})" for x, y in baseline.line))
        for setting, members in settings(known[seed]).items():
            each = "; ".join(
                f"{run.rate:.3g}: {1e4 * baseline.area([run]):+.1f} "
                f"({run.points[-1][0]:.3f}, {run.points[-1][1]:.3f}; {baseline.height(run.points[-1]):+.3f})"
                for run in members
            )
            print(f"  {setting:28s} {1e4 * baseline.area(members):+7.1f} of {len(members)} rates | {each}")
    if len(baselines) < len(SEEDS):
        return
    print("mean over seeds")
    both = {seed: settings(ours) for seed, ours in known.items()}
    for setting in (each for each in both[SEEDS[1]] if each in both[SEEDS[0]]):
        areas = [baselines[seed].area(both[seed][setting]) for seed in SEEDS]
        print(f"  {setting:28s} {1e4 * fmean(areas):+7.1f} ({', '.join(f'{1e4 * area:+.1f}' for area in areas)})")
        print(f"    rate {chosen_rate([both[seed][setting] for seed in SEEDS], known, baselines):g}")


def chosen_rate(
    members: Sequence[Sequence[Run]], known: Mapping[int, Sequence[Run]], baselines: Mapping[int, Baseline]
) -> float:
    """Return the learning rate at which a setting is confirmed, by its runs of both seeds.

    It is the rate whose last point is highest above GRPO's frontier, of those that reach the pass@1 of GRPO at the
    smallest rate; the one with the largest pass@1 where none does. Means over seeds.
    """
    least = fmean(run.points[-1][0] for runs in known.values() for run in runs if _is_grpo_at(run, LEAST_RATE))
    rates: dict[float, list[Run]] = {}
    for run in (run for runs in members for run in runs):
        rates.setdefault(run.rate, []).append(run)
    passes = {rate: fmean(run.points[-1][0] for run in runs) for rate, runs in rates.items()}
    heights = {
        rate: fmean(baselines[run.seed].height(run.points[-1]) for run in runs)
        for rate, runs in rates.items()
        if passes[rate] >= least
    }
    return max(heights, key=heights.__getitem__) if heights else max(passes, key=passes.__getitem__)


def _is_grpo_at(run: Run, rate: float) -> bool:
    return run.method == "grpo" and run.rate == rate


def settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs by setting, each in the order of rates."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.rate):
        found.setdefault(run.setting, []).append(run)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
