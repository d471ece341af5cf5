"""Tables of the study's runs: `results.csv`, `differences.csv`, and the README's two tables on the terminal.

A difference is of pass@k, problem by problem, meaned over the seeds that both methods have; its interval is the middle
95 % of 10,000 resamplings of the problems, so it says nothing of what other seeds would give.

    python examples/solution_multiplicity/table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parent))

from study import HERE, KS, METHODS, REPOSITORY, RUNS, TASKS, base_file, counts_file, run_name

from megasharp.evals.passk import pass_at_k

RESAMPLINGS = 10_000
SEEDS = range(1, 10)
TESTS = {
    "countdown_3": HERE / "data" / "countdown_3" / "test.jsonl",
    "countdown_4": REPOSITORY / "examples" / "quickstart" / "data" / "test.jsonl",
}


def multiplicity(task: str) -> float:
    """Distinct solutions a held-out problem, counted by the solver; a puzzle of knights has one."""
    if task not in TESTS:
        return 1.0
    rows = [json.loads(line) for line in TESTS[task].read_text().splitlines()]
    return float(np.mean([row["solutions"] for row in rows]))


def passes(path: Path, k: int) -> np.ndarray:
    """pass@k of each problem [P]."""
    table = pd.read_parquet(path)
    return np.array([pass_at_k(n, c, k) for n, c in zip(table["samples"], table["correct"], strict=True)])


def entropy(task: str, method: str, seed: int) -> float:
    """Nats a token, the mean of the last ten steps."""
    lines = (RUNS / run_name(task, method, seed) / "metrics.jsonl").read_text().splitlines()
    values = [row["entropy/policy"] for row in map(json.loads, lines) if "entropy/policy" in row]
    return float(np.mean(values[-10:]))


def results() -> pd.DataFrame:
    """A row for each model."""
    rows = []
    for task in TASKS:
        rows.append((task, "base", 0, None, *(passes(base_file(task), k).mean() for k in KS)))
        for method in METHODS:
            for seed in SEEDS:
                path = counts_file(task, method, seed)
                if path.exists():
                    nats = entropy(task, method, seed)
                    rows.append((task, method, seed, nats, *(passes(path, k).mean() for k in KS)))
    return pd.DataFrame(rows, columns=["task", "method", "seed", "entropy", *(f"pass@{k}" for k in KS)])


def differences() -> pd.DataFrame:
    """For each task and k: bonus and penalty less GRPO, and bonus less penalty."""
    rng = np.random.default_rng(1)
    rows = []
    for task in TASKS:
        for method, other in (("bonus", "grpo"), ("penalty", "grpo"), ("bonus", "penalty")):
            both = [s for s in SEEDS if counts_file(task, method, s).exists() and counts_file(task, other, s).exists()]
            for k in KS if both else ():
                each = np.array(
                    [passes(counts_file(task, method, s), k) - passes(counts_file(task, other, s), k) for s in both]
                )
                problems = each.mean(axis=0)
                drawn = rng.integers(0, len(problems), (RESAMPLINGS, len(problems)))
                low, high = np.quantile(problems[drawn].mean(axis=1), [0.025, 0.975])
                by_seed = " ".join(f"{value:+.3f}" for value in each.mean(axis=1))
                rows.append(
                    (task, multiplicity(task), f"{method} - {other}", k, len(both), problems.mean(), low, high, by_seed)
                )
    columns = ["task", "multiplicity", "difference", "k", "seeds", "mean", "low", "high", "by_seed"]
    return pd.DataFrame(rows, columns=columns)


def main() -> None:
    """Write both files and print them as tables."""
    found, compared = results(), differences()
    found.round(4).to_csv(HERE / "results.csv", index=False)
    compared.round(4).to_csv(HERE / "differences.csv", index=False)
    print("| task | solutions a problem | model | seeds | entropy | " + " | ".join(f"pass@{k}" for k in KS) + " |")
    print("|---" * (5 + len(KS)) + "|")
    for (task, method), some in found.groupby(["task", "method"], sort=False):
        mean = some.mean(numeric_only=True)
        nats = "" if method == "base" else f"{mean['entropy']:.2f}"
        values = " | ".join(f"{mean[f'pass@{k}']:.3f}" for k in KS)
        print(f"| {task} | {multiplicity(str(task)):.1f} | {method} | {len(some)} | {nats} | {values} |")
    print(
        "\n| task | solutions a problem | pass@8 | seeds | mean | 95 % | seed by seed |\n|---|---|---|---|---|---|---|"
    )
    for row in compared[compared["k"] == 8].itertuples():
        print(
            f"| {row.task} | {row.multiplicity:.1f} | {row.difference} | {row.seeds} | {row.mean:+.3f} "
            f"| {row.low:+.3f} to {row.high:+.3f} | {row.by_seed} |"
        )


if __name__ == "__main__":
    main()
