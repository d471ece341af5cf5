"""Run the study: three tasks, GRPO with an entropy bonus, with a penalty and with neither, and the seeds asked for.

One run after the other; a run that has its last evaluation is passed over, one that was cut off goes on. `table.py`
makes the tables of what there is.

    python examples/solution_multiplicity/study.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RUNS = REPOSITORY / "runs"
STEPS = 40
SAMPLES = 32
COEFFICIENT = 0.03
KS = (1, 8, 32)
BASE = "examples/quickstart/base"

# For each task: what its runs have besides run.yaml.
TASKS = {
    "knights": [
        "model.path=examples/solution_multiplicity/knights_base",
        "data.task=knights_short",
        "data.path=examples/solution_multiplicity/data/knights/train.jsonl",
    ],
    "countdown_3": ["data.path=examples/solution_multiplicity/data/countdown_3/train.jsonl"],
    "countdown_4": [],
}
METHODS = {
    "grpo": [],
    "bonus": ["recipe.methods=[grpo,entropy_bonus]", f"recipe.entropy_bonus.coefficient={COEFFICIENT}"],
    "penalty": ["recipe.methods=[grpo,entropy_penalty]", f"recipe.entropy_penalty.coefficient={COEFFICIENT}"],
}


def suite(task: str) -> str:
    """The suite of a task's held-out problems."""
    return f"multiplicity_{task}"


def run_name(task: str, method: str, seed: int) -> str:
    """The run's name under `runs/`."""
    return f"multiplicity-{task}-{method}-s{seed}"


def counts_file(task: str, method: str, seed: int) -> Path:
    """The table of a run's last evaluation, a row a problem."""
    return RUNS / run_name(task, method, seed) / "evals" / f"step_{STEPS:06d}" / f"{suite(task)}.parquet"


def base_file(task: str) -> Path:
    """The same of the model that the task's runs begin from."""
    return RUNS / "multiplicity-base" / f"{suite(task)}.parquet"


def evaluate_base(task: str) -> None:
    """Sample the model that a task's runs begin from, once."""
    if base_file(task).exists():
        return
    model = next((each.partition("=")[2] for each in TASKS[task] if each.startswith("model.path")), BASE)
    suite_file, folder = HERE / "suites" / f"{suite(task)}.yaml", base_file(task).parent
    ks = ",".join(map(str, KS))
    megasharp("eval", model, "--suite", str(suite_file), "--n", str(SAMPLES), "--k", ks, "--out", str(folder))


def train(task: str, method: str, seed: int) -> None:
    """One run, or the rest of it."""
    if counts_file(task, method, seed).exists():
        return
    name = run_name(task, method, seed)
    overrides = [f"name={name}", f"seed={seed}", f"steps={STEPS}", *TASKS[task], *METHODS[method]]
    overrides.append(f"eval.suites=[{HERE.relative_to(REPOSITORY) / 'suites' / suite(task)}.yaml]")
    resume = ["--resume"] if (RUNS / name).exists() else []
    megasharp("train", str(HERE / "run.yaml"), *resume, *overrides)


def megasharp(*arguments: str) -> None:
    """The command line; what it prints goes to this one's output."""
    subprocess.run([sys.executable, "-m", "megasharp.cli", *arguments], cwd=REPOSITORY, check=True)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    for task in TASKS:
        evaluate_base(task)
    for seed in parser.parse_args().seeds:
        for method in METHODS:
            for task in TASKS:
                train(task, method, seed)


if __name__ == "__main__":
    main()
