"""Train short runs of the quickstart with other settings, and print the tables of pages that hold them.

    python tools/quickstart_tables.py                       # the tables' names
    python tools/quickstart_tables.py tuning                # what docs/how-to/tune-*.md have of 30 steps
    python tools/quickstart_tables.py gap memory --runs runs/tables

A table has a line for each run and a column for each metric: its mean over some steps, its maximum where its name ends
in `_max`, and several of them with commas between where the table has several spans of steps. A run has as many ranks
as this machine gives it; one of `--runs` that is there already is an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
TUNING = "policy.optimizer.lr=1e-4 eval.every=30 eval.suites=[countdown_dev] eval.n=32 eval.k=[1,2,4,8,16,32]"
NO_EVALUATION = "eval.every=0 eval.suites=[]"
DLC = f"recipe.methods=[grpo,dlc] recipe.dlc.memory.path={QUICKSTART / 'memory'}"
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Table:
    """Runs of so many steps that share some keys; `spans` are the first and the last steps that a figure is of."""

    page: str
    steps: int
    spans: tuple[tuple[int, int], ...]
    metrics: tuple[str, ...]
    shared: str
    runs: Mapping[str, str]


def rates(*names: str, mu: float, **others: str) -> dict[str, str]:
    """The memory network's rate in runs with DLC: `1x` is the policy's own."""
    keys = {name: f"{DLC} recipe.dlc.mu={mu} recipe.dlc.memory.lr={name}" for name in names}
    more = " ".join(f"recipe.dlc.memory.{key}={value}" for key, value in others.items())
    return {f"mu {mu}, {name} {' '.join(others.values())}".strip(): f"{keys[name]} {more}".strip() for name in names}


TABLES = {
    "gap": Table(
        "docs/how-to/debug-a-log-prob-gap.md",
        6,
        ((1, 6),),
        ("policy/engine_gap", "policy/engine_gap_max"),
        NO_EVALUATION,
        {"float32": "", "bfloat16": "model.dtype=bfloat16 guard.engine_gap=0.001"},
    ),
    "tuning": Table(
        "docs/how-to/tune-casp.md, -ds, -dlc and -iac",
        30,
        ((26, 30),),
        (
            *("eval/countdown_dev/pass@1", "eval/countdown_dev/pass@32", "eval/countdown_dev/distinct_correct"),
            *("reward/mean", "reward/outcome_format", "entropy/policy", "candidates/lambda_1", "policy/grad_norm"),
            *("policy/advantage_positive", "policy/advantage_negative", "policy/ratio", "policy/kl_old"),
            *("method/casp/penalised", "method/ds/term_correct", "method/ds/term_other", "method/iac/weight"),
            *("memory/cross_entropy", "memory/argmax_moved", "memory/responses_moved", "memory/calibration_kl"),
            "rollout/sampler_policy_gap",
        ),
        TUNING,
        {
            "GRPO": "",
            "CaSP, alpha 0.01": "recipe.methods=[grpo,casp] recipe.casp.alpha=0.01",
            "CaSP, alpha 0.5": "recipe.methods=[grpo,casp] recipe.casp.alpha=0.5",
            "DS, both gammas 0.01": "recipe.methods=[grpo,ds] recipe.ds.gamma_p=0.01 recipe.ds.gamma_n=0.01",
            "DS, gammas 0.1 and 0.01": "recipe.methods=[grpo,ds] recipe.ds.gamma_p=0.1 recipe.ds.gamma_n=0.01",
            "DS, both gammas 0.5": "recipe.methods=[grpo,ds] recipe.ds.gamma_p=0.5 recipe.ds.gamma_n=0.5",
            "DLC, mu 0.1": f"{DLC} recipe.dlc.mu=0.1",
            "DLC, mu 1.0": f"{DLC} recipe.dlc.mu=1.0",
            "IAC, alpha 1": "recipe.methods=[grpo,iac] recipe.iac.alpha=1",
            "IAC, alpha 8": "recipe.methods=[grpo,iac] recipe.iac.alpha=8",
            "IAC, form literal": "recipe.methods=[grpo,iac] recipe.iac.form=literal",
        },
    ),
    "memory": Table(
        "docs/reference/methods.md, Tuning the memory network",
        40,
        ((15, 15), (40, 40)),
        ("memory/cross_entropy", "entropy/policy"),
        NO_EVALUATION,
        {
            **rates("1x", "3x", "10x", "30x", mu=0.2, start="cold"),
            **rates("1x", "3x", "10x", "30x", mu=0.2, start="pretrained"),
        },
    ),
    "memory_whole": Table(
        "docs/reference/methods.md, Tuning the memory network; docs/how-to/tune-dlc.md",
        200,
        ((200, 200),),
        ("eval/countdown_test/pass@1", "eval/countdown_test/pass@64"),
        "eval.every=200",
        {"GRPO": "", **rates("1x", "10x", mu=0.2), **rates("1x", "3x", "10x", "30x", mu=0.5)},
    ),
    "warmup": Table(
        "examples/quickstart/README.md",
        150,
        ((150, 150),),
        ("eval/countdown_test/pass@1", "eval/countdown_test/pass@64"),
        "eval.every=150",
        {
            "as shipped": "",
            "no warm-up, constant rate": "policy.optimizer.warmup_steps=0 policy.optimizer.decay=constant",
            "twice the rate": "policy.optimizer.lr=4e-4",
        },
    ),
}


def main() -> None:
    """Train the runs of the tables that are asked for; print each table when its runs are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--runs", type=Path, help="folder for the runs, which stay; without it they are removed")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]}; there are {', '.join(TABLES)}")
    for name in given.names or TABLES:
        table = TABLES[name]
        if not given.names:
            print(f"{name:12}  {len(table.runs):2} runs of {table.steps:3} steps, for {table.page}")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (given.runs or Path(temporary)) / name
            lines = {
                label: train(folder, f"{name}-{number}", table, keys)
                for number, (label, keys) in enumerate(table.runs.items())
            }
        print(f"\n{name}: {table.page}\n\n{markdown(table, lines)}", flush=True)


def train(folder: Path, name: str, table: Table, keys: str) -> list[Metrics]:
    """Train a run of the table; returns its metrics, step by step."""
    words = [f"name={name}", f"steps={table.steps}", *table.shared.split(), *keys.split()]
    command = [sys.executable, "-m", "megasharp.cli", "train", str(QUICKSTART / "run.yaml")]
    print("#", *words, flush=True)
    subprocess.run([*command, "--runs", str(folder), *words], cwd=REPOSITORY, check=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def markdown(table: Table, lines: Mapping[str, Sequence[Metrics]]) -> str:
    """The table; a metric that a run does not have is left empty."""
    rows = [["", *(f"`{metric}`" for metric in table.metrics)], ["---"] * (len(table.metrics) + 1)]
    rows += [[label, *(cell(table, found, metric) for metric in table.metrics)] for label, found in lines.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(table: Table, found: Sequence[Metrics], metric: str) -> str:
    """A figure for each span of steps in which the metric was recorded."""
    values = [[row[metric] for row in found if metric in row and a <= row["step"] <= b] for a, b in table.spans]
    over = max if metric.endswith("_max") else fmean
    return ", ".join(f"{over(each):.3g}" for each in values if each)


if __name__ == "__main__":
    main()
