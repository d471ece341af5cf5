"""Run what is left of a sweep of this study, and record each run as it ends.

    python examples/frontier/study.py examples/frontier/screen.yaml --at-once 2

A recorded run is not repeated, so the same command goes on where it stopped, on this machine or another. With `--test`
the last model is measured on suites too, and so is the untrained one with each seed of the sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from threading import Lock

from records import COUNTS, CURVES, RESULTS, RUNS, TRAINING, UNTRAINED, WINDOW, WINDOWS, add, drop_unfinished, table

from megasharp.common.errors import UserError
from megasharp.config.core import dump_tree
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import RunHistory, read_run
from megasharp.reporting.sweeps.grid import Cell, cells, load_sweep

Rows = dict[str, tuple[Sequence[str], list[list[object]]]]


@dataclass(frozen=True, slots=True)
class Test:
    """Suites and temperatures of the last models' test, with commas between, and samples for each problem."""

    suites: str
    temperatures: str
    samples: int


def main() -> int:
    """Run what is not recorded; return the number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's file")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time, each on one thread")
    parser.add_argument("--test", help="suites to measure the last models on, such as countdown_test")
    parser.add_argument("--temperature", default="1.0", help="temperatures of these samples")
    parser.add_argument("--base", default="examples/quickstart/base", help="the untrained model")
    parser.add_argument("--max-tokens", type=int, default=20, help="limit of the untrained model's responses")
    parser.add_argument("--samples", type=int, default=256, help="samples for each problem of it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for the runs, deleted as they end")
    arguments = parser.parse_args()
    config = load_sweep(arguments.sweep)
    results, folder, lock, failed = arguments.results, arguments.work / config.name, Lock(), []
    folder.mkdir(parents=True, exist_ok=True)
    test = Test(arguments.test, arguments.temperature, arguments.samples) if arguments.test else None
    drop_unfinished(results)
    recorded = {line["run"] for name in ("runs", "counts") for line in table(name, results)}
    left: list[Cell | int] = [cell for cell in cells(config, arguments.sweep) if cell.name not in recorded]
    if test is not None:
        left = [*(seed for seed in config.seeds if f"{UNTRAINED}_s{seed}" not in recorded), *left]
    print(f"{config.name}: {len(left)} runs are left", flush=True)

    def one(item: Cell | int) -> None:
        name = f"{UNTRAINED}_s{item}" if isinstance(item, int) else item.name
        try:
            if not isinstance(item, int):
                rows = trained(item, folder, config.name, test)
            elif test is not None:
                # A run says how long a response may be, a folder of weights does not.
                limit = ("--max-tokens", str(arguments.max_tokens))
                rows = {"counts": (COUNTS, measured(name, arguments.base, item, folder, test, limit))}
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", flush=True)
            return
        with lock:
            for what, (columns, lines) in rows.items():
                add(results, what, columns, lines)
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(one, left))
    return len(failed)


def trained(cell: Cell, folder: Path, sweep: str, test: Test | None) -> Rows:
    """Train one run in `folder`, measure it, delete it; return rows by the names of their files, `runs` last."""
    began = time.monotonic()
    file, run = folder / f"{cell.name}.yaml", folder / cell.name
    file.write_text(dump_tree(cell.tree), encoding="utf-8")
    megasharp(folder / f"{cell.name}.log", "train", str(file), "--runs", str(folder), "--resume")
    history = read_run(run)
    rows: Rows = {"curves": (CURVES, curve(cell.name, history)), "training": (WINDOWS, windows(cell.name, history))}
    if test is not None:
        rows["counts"] = (COUNTS, measured(cell.name, str(run), cell.seed, folder, test))
    settings = {key: value for key, value in cell.tree.items() if key not in ("name", "seed")}
    # The first is run.yaml; the others are presets.
    settings["include"] = [os.path.relpath(file) for file in cell.tree["include"][1:]]
    seconds = f"{time.monotonic() - began:.0f}"
    line = [cell.name, cell.row, cell.seed, sweep, history.last_step, history.tokens, seconds, json.dumps(settings)]
    shutil.rmtree(run)
    return {**rows, "runs": (RUNS, [line])}


def megasharp(log: Path, *words: str) -> None:
    """Run a megasharp command; its output goes to the end of `log`."""
    with log.open("a", encoding="utf-8") as output:
        command = [sys.executable, "-m", "megasharp.cli", *words]
        subprocess.run(command, check=True, stdout=output, stderr=output, stdin=subprocess.DEVNULL)


def curve(name: str, history: RunHistory) -> list[list[object]]:
    """Read a run's evaluations in the order of their steps."""
    tokens = sampled(history)
    rows: list[list[object]] = []
    for path in sorted((history.folder / "evals").glob("step_*/*.json")):
        result = load_result(path)
        figures, step = result.named(), result.step or 0
        values = [f"{figures[column]:.6g}" if column in figures else "" for column in CURVES[3:]]
        rows.append([name, step, tokens[step], *values])
    return rows


def sampled(history: RunHistory) -> dict[int, int]:
    """Return the number of tokens that were sampled until the end of each step."""
    steps = [0, *(int(line["step"] or 0) for line in history.training)]
    return dict(
        zip(steps, accumulate([0, *(int(line["rollout/tokens"] or 0) for line in history.training)]), strict=True)
    )


def windows(name: str, history: RunHistory) -> list[list[object]]:
    """Average the training metrics over windows of steps; a line has its last step."""
    tokens, rows = sampled(history), list[list[object]]()
    for start in range(0, len(history.training), WINDOW):
        lines = history.training[start : start + WINDOW]
        step = int(lines[-1]["step"] or 0)
        known = [[value for line in lines if (value := line.get(metric)) is not None] for metric in TRAINING.values()]
        rows.append([name, step, tokens[step], *(f"{fmean(each):.6g}" if each else "" for each in known)])
    return rows


def measured(
    name: str, model: str, seed: int, folder: Path, test: Test, limit: Sequence[str] = ()
) -> list[list[object]]:
    """Measure a model on the test suites; return their lines of `counts.csv`, problems in each suite's order."""
    out = folder / f"{name}_test"
    shutil.rmtree(out, ignore_errors=True)
    ks = ",".join(str(2**power) for power in range(test.samples.bit_length()))
    options = ("--n", str(test.samples), "--k", ks, "--seed", str(seed), "--keep", "none", "--out", str(out))
    sampling = ("--suite", test.suites, "--temperature", test.temperatures)
    megasharp(folder / f"{name}.log", "eval", model, *sampling, *options, *limit)
    results = [load_result(path) for path in sorted(out.rglob("*.json"))]
    shutil.rmtree(out)
    return [
        [
            *(name, one.suite, one.temperature, one.n, one.tokens),
            *(" ".join(str(getattr(row, what)) for row in one.rows) for what in ("correct", "distinct_correct")),
        ]
        for one in results
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"study.py: {error}")
