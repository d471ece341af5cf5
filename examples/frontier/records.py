"""The study's recorded runs: CSV files in `results/`, which are committed because run folders do not outlive a machine.

`runs.csv` has a line for each run, `curves.csv` one for each evaluation on the development problems, `training.csv`
means over windows of training steps. `counts.csv` has last models on test problems: correct samples and distinct
correct answers, problem by problem in the suite's order.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np

from megasharp.evals.crossed import Crossed, t_quantile, t_tail
from megasharp.evals.estimators import pass_at_k
from megasharp.evals.frontier import MethodRuns, Values

RESULTS = Path(__file__).parent / "results"
RUNS = ("run", "row", "seed", "sweep", "steps", "tokens", "seconds", "settings")
CURVES = (
    *("run", "step", "tokens", *(f"pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64)), "greedy", "distinct_correct"),
    *("token_entropy", "answer_entropy", "lambda_1"),
)
WINDOW = 20
TRAINING = {
    "entropy": "entropy/policy",
    "lambda_1": "candidates/lambda_1",
    "lambda_2": "candidates/lambda_2",
    "lambda_3": "candidates/lambda_3",
    "distinct_next": "candidates/distinct_next",
    "grad_norm": "policy/grad_norm",
    "reward": "reward/mean",
    # Of graded.py alone.
    "good": "reward/function/graded/good",
    "better": "reward/function/graded/better",
}
WINDOWS = ("run", "step", "tokens", *TRAINING)
COUNTS = ("run", "suite", "temperature", "samples", "tokens", "correct", "distinct_correct")
TEST = "countdown_test"

METHODS = (
    *("grpo", "dapo", "entropy_bonus", "kl", "casp", "iac", "dapo_iac", "ds_token", "ds_sequence", "ds_reward"),
    *("dlc", "dapo_iac_dlc", "nsr", "w_reinforce", "grpo_n", "gspo", "passk_training"),
)
UNTRAINED = "untrained"
MIDDLE_RATE = 5.0e-5
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. `setting` is its method with the coefficient and without the learning rate."""

    name: str
    method: str
    setting: str
    rate: float
    seed: int
    tokens: int
    curve: Sequence[Mapping[str, float]]

    @property
    def points(self) -> list[Point]:
        """pass@1 and pass@64 of its evaluations, without that of the untrained model."""
        return [(line["pass@1"], line["pass@64"]) for line in self.curve if line["step"]]


def read_runs() -> list[Run]:
    """Return all recorded runs, in the order in which they ended."""
    curves: dict[str, list[dict[str, float]]] = {}
    for line in table("curves"):
        figures = {key: float(value) for key, value in line.items() if key != "run" and value}
        curves.setdefault(line["run"], []).append(figures)
    found = []
    for line in table("runs"):
        policy = json.loads(line["settings"]).get("policy", {})
        rate = float(policy.get("optimizer", {}).get("lr", MIDDLE_RATE))
        setting = line["row"].split("-lr")[0]
        name, seed, tokens = line["run"], int(line["seed"]), int(line["tokens"])
        found.append(Run(name, method_of(setting), setting, rate, seed, tokens, curves[name]))
    return found


def rate_name(rate: float) -> str:
    """Format a learning rate as one writes it: 2.5e-5, 1e-4."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")


def method_of(setting: str) -> str:
    """Return the method that a setting's name begins with, the longest one: dapo_iac is not dapo."""
    return max((each for each in METHODS if setting.startswith(each)), key=len)


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return runs by setting and rate, GRPO first."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.method != "grpo", run.setting, run.rate, run.seed)):
        found.setdefault(f"{run.setting} {rate_name(run.rate)}", []).append(run)
    return found


def untrained_point(runs: Iterable[Run]) -> Point:
    """Return the mean of pass@1 and pass@64 over the evaluations before training."""
    first = [line for run in runs for line in run.curve if not line["step"]]
    return fmean(line["pass@1"] for line in first), fmean(line["pass@64"] for line in first)


def tested(name: str, runs: Sequence[str], metric: str) -> MethodRuns:
    """Return pass@1 and a metric of these runs on the test problems; pass@k for any k <= 256, or distinct_correct."""
    lines = counts(TEST)
    return method_runs(name, [lines[run] for run in runs], metric)


def method_runs(name: str, lines: Sequence[Mapping[str, str]], metric: str) -> MethodRuns:
    """Return pass@1 and a metric of lines of `counts.csv`, one a run."""
    return MethodRuns(name, values(lines, "pass@1"), values(lines, metric))


def counts(suite: str, temperature: float = 1.0, folder: Path = RESULTS) -> dict[str, dict[str, str]]:
    """Return the lines of `counts.csv` on one suite at one temperature, by their runs."""
    lines = table("counts", folder)
    return {line["run"]: line for line in lines if line["suite"] == suite and float(line["temperature"]) == temperature}


def values(lines: Sequence[Mapping[str, str]], metric: str) -> Values:
    """Return a metric of lines of `counts.csv`, [lines, problems]."""
    if metric == "distinct_correct":
        return np.array([[float(count) for count in line[metric].split()] for line in lines])
    k = int(metric.removeprefix("pass@"))
    rows = []
    for line in lines:
        samples = int(line["samples"])
        rows.append([pass_at_k(samples, int(count), k) for count in line["correct"].split()])
    return np.array(rows)


def t_test(values_R: Values) -> tuple[float, float, float]:
    """Return the mean over seeds, the half-width of its t interval, and the p-value."""
    freedom, error = len(values_R) - 1, float(values_R.std(ddof=1)) / sqrt(len(values_R))
    mean = float(values_R.mean())
    # Shares of 128 problems may differ by the same number in each of three seeds.
    p = float(t_tail(np.array([abs(mean) / error]), freedom)[0]) if error and mean else float(mean == 0.0)
    return mean, float(t_quantile(np.asarray(0.05), freedom)) * error, p


def table(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Return a table's lines; none where there is no such file yet."""
    path = folder / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def add(folder: Path, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Append rows to a table, whose first line names its columns."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([columns, *rows] if new else rows)


def write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table anew."""
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([columns, *rows])


def difference_text(one: Crossed) -> str:
    """Format a difference with its interval."""
    interval = one.interval()
    return f"{float(one.difference):+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def drop_unfinished(folder: Path) -> None:
    """Leave out lines of runs that `runs.csv`, which is written last, does not name: they were cut off meanwhile."""
    finished = {line["run"] for line in table("runs", folder)}
    for name, columns in (("curves", CURVES), ("training", WINDOWS), ("counts", COUNTS)):
        lines = table(name, folder)
        kept = [line for line in lines if line["run"] in finished or line["run"].startswith(UNTRAINED)]
        if len(kept) < len(lines):
            (folder / f"{name}.csv").unlink()
            add(folder, name, columns, [[line[column] for column in columns] for line in kept])
