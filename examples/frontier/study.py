"""Run what is left of a sweep of this study, and keep each finished run as rows of CSV files.

    python examples/frontier/study.py examples/frontier/screen.yaml --at-once 2

Run folders do not outlive a machine; `results/` is committed, and a run that it holds is not repeated. `runs.csv` has a
line for each run, `curves.csv` one for each evaluation in a run, and with `--test` `counts.csv` one for each run's last
model on the 256 test problems: of 256 samples, correct ones and distinct correct answers by problem.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from megasharp.config.core import dump_tree
from megasharp.evals.result_files import load_result
from megasharp.reporting.history import read_run
from megasharp.reporting.sweeps.grid import Cell, cells, load_sweep

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TEST, SAMPLES = "countdown_test", 256
RUNS = ("run", "row", "seed", "sweep", "steps", "tokens", "seconds", "settings")
CURVES = (
    *("run", "step", "tokens", *(f"pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64)), "greedy", "distinct_correct"),
    *("token_entropy", "answer_entropy", "lambda_1"),
)
COUNTS = ("run", "samples", "tokens", "correct", "distinct_correct")


def main() -> int:
    """Run the cells that no CSV file has; return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's file")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time, each on one thread")
    parser.add_argument("--test", action="store_true", help="measure the last model on the test problems too")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for the runs, deleted as they end")
    arguments = parser.parse_args()
    config = load_sweep(arguments.sweep)
    left = [cell for cell in cells(config, arguments.sweep) if cell.name not in recorded("runs")]
    print(f"{config.name}: {len(left)} runs are left", flush=True)
    lock, failed = Lock(), []

    def one(cell: Cell) -> None:
        try:
            tables = trained(cell, arguments.work / config.name, config.name, test=arguments.test)
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(cell.name)
            print(f"{cell.name} failed: {error}", flush=True)
            return
        with lock:
            for name, (columns, rows) in tables.items():
                add(name, columns, rows)
        print(f"{time.strftime('%H:%M:%S')} {cell.name}", flush=True)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(one, left))
    return len(failed)


def trained(cell: Cell, folder: Path, sweep: str, *, test: bool) -> dict[str, tuple[Sequence[str], list[list[object]]]]:
    """Train one run in `folder`, measure it, delete it; return rows by the names of their files, `runs` last."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    file, run = folder / f"{cell.name}.yaml", folder / cell.name
    file.write_text(dump_tree(cell.tree), encoding="utf-8")
    with (folder / f"{cell.name}.log").open("w", encoding="utf-8") as log:

        def megasharp(*words: str) -> None:
            command = [sys.executable, "-m", "megasharp.cli", *words]
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

        megasharp("train", str(file), "--runs", str(folder), "--resume")
        tables: dict[str, tuple[Sequence[str], list[list[object]]]] = {"curves": (CURVES, curve(cell.name, run))}
        if test:
            out = folder / f"{cell.name}_test"
            shutil.rmtree(out, ignore_errors=True)
            ks = "1,2,4,8,16,32,64,128,256"
            options = ("--n", str(SAMPLES), "--k", ks, "--keep", "none", "--seed", str(cell.seed), "--out", str(out))
            megasharp("eval", str(run), "--suite", TEST, *options)
            tables["counts"] = (COUNTS, [counts(cell.name, next(out.rglob(f"{TEST}.json")))])
            shutil.rmtree(out)
    history = read_run(run)
    settings = {key: value for key, value in cell.tree.items() if key not in ("include", "name", "seed")}
    seconds = f"{time.monotonic() - began:.0f}"
    line = [cell.name, cell.row, cell.seed, sweep, history.last_step, history.tokens, seconds, json.dumps(settings)]
    shutil.rmtree(run)
    return {**tables, "runs": (RUNS, [line])}


def curve(name: str, run: Path) -> list[list[object]]:
    """Read a run's evaluations in the order of their steps."""
    tokens = {0: 0}
    for line in read_run(run).training:
        tokens[int(line["step"] or 0)] = tokens[max(tokens)] + int(line["rollout/tokens"] or 0)
    rows = []
    for path in sorted((run / "evals").glob("step_*/countdown_dev.json")):
        result = load_result(path)
        figures = result.named()
        assert result.step is not None
        at = [f"{figures[column]:.6g}" if column in figures else "" for column in CURVES[3:]]
        rows.append([name, result.step, tokens[result.step], *at])
    return rows


def counts(name: str, path: Path) -> list[object]:
    """Read an evaluation's correct samples and distinct correct answers, problem by problem in the suite's order."""
    result = load_result(path)
    correct, distinct = ([getattr(row, what) for row in result.rows] for what in ("correct", "distinct_correct"))
    return [name, result.n, result.tokens, " ".join(map(str, correct)), " ".join(map(str, distinct))]


def recorded(table: str) -> Mapping[str, Mapping[str, str]]:
    """Return a table's lines by their runs."""
    path = RESULTS / f"{table}.csv"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {line["run"]: line for line in csv.DictReader(lines)}


def recorded_curves() -> Mapping[str, list[dict[str, float]]]:
    """Return the evaluations of each run in the order of their steps."""
    found: dict[str, list[dict[str, float]]] = {}
    with (RESULTS / "curves.csv").open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            found.setdefault(line.pop("run"), []).append({key: float(value) for key, value in line.items() if value})
    return found


def add(table: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Append rows to a table, which begins with its columns' names."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{table}.csv"
    new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([columns, *rows] if new else rows)


if __name__ == "__main__":
    sys.exit(main())
