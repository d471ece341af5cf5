"""Analyse the study's recorded runs as analysis.md says.

python examples/frontier/analyse.py tuning       # areas of settings, by seed, and last points
python examples/frontier/analyse.py confirm      # results.md with the primary test, and the pictures
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from study import recorded, recorded_curves

from megasharp.evals.frontier import area_above, upper_hull

METHODS = (
    *("grpo", "dapo", "entropy_bonus", "kl", "casp", "iac", "dapo_iac", "ds_token", "ds_sequence", "ds_reward"),
    *("dlc", "dapo_iac_dlc", "nsr", "w_reinforce", "grpo_n", "gspo", "passk_training"),
)
MIDDLE_RATE = 5.0e-5
TUNING_SEEDS = (11, 12)
Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """A recorded run: `setting` is its method with the coefficient, without the learning rate."""

    name: str
    method: str
    setting: str
    rate: float
    seed: int
    curve: Sequence[Mapping[str, float]]

    @cached_property
    def points(self) -> list[Point]:
        """pass@1 and pass@64 of its evaluations after training began."""
        return [(line["pass@1"], line["pass@64"]) for line in self.curve if line["step"]]


def read_runs() -> list[Run]:
    """Return all recorded runs."""
    curves = recorded_curves()
    found = []
    for name, line in recorded("runs").items():
        settings = json.loads(line["settings"])
        rate = float(settings.get("policy", {}).get("optimizer", {}).get("lr", MIDDLE_RATE))
        setting = line["row"].split("-lr")[0]
        # The longest name that it begins with: dapo_iac is not dapo.
        method = max((each for each in METHODS if setting.startswith(each)), key=len)
        found.append(Run(name, method, setting, rate, int(line["seed"]), curves[name]))
    return found


def tuning(runs: Sequence[Run]) -> None:
    """Print each setting's area beside GRPO's frontier of the same seed: of all of its rates, and of each alone."""
    for seed in TUNING_SEEDS:
        ours = [run for run in runs if run.seed == seed]
        baseline = [point for run in ours if run.method == "grpo" for point in run.points]
        if not baseline:
            continue
        start = untrained(ours)
        line = upper_hull([start, *baseline])
        print(f"seed {seed}: GRPO's frontier " + ", ".join(f"({x:.3f}, {y:.3f})" for x, y in line))
        for setting in dict.fromkeys(run.setting for run in ours):
            members = sorted((run for run in ours if run.setting == setting), key=lambda run: run.rate)
            area = area_above([point for run in members for point in run.points], baseline, start)
            each = ", ".join(
                f"{run.rate:.3g}: {1e4 * area_above(run.points, baseline, start):+.1f} "
                f"(last {run.points[-1][0]:.3f}, {run.points[-1][1]:.3f})"
                for run in members
            )
            print(f"  {setting:28s} {1e4 * area:+7.1f} of {len(members)} rates; {each}")


def untrained(runs: Iterable[Run]) -> Point:
    """Return the mean point of the model before training."""
    first = [line for run in runs for line in run.curve if not line["step"]]
    return fmean(line["pass@1"] for line in first), fmean(line["pass@64"] for line in first)


if __name__ == "__main__":
    if sys.argv[1:] != ["tuning"]:
        sys.exit(__doc__)
    tuning(read_runs())
