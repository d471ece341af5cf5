"""Measure the report on long runs: `python tools/bench_report.py [--runs 8] [--steps 5000]`.

Writes run folders with every metric that has a name in words, as random walks, and evaluations of one suite every tenth
of the steps; then the page, and opens it in a headless Chromium. They hold no responses and no probes. Prints seconds
to write the page, its size, the time from navigation to all visible charts drawn (the median of some openings, and the
slowest), and the page's height at two widths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from headless import chromium, opened

from megasharp.cli.report import write_report
from megasharp.evals.result import EvalSetting, summarize
from megasharp.evals.result_files import save
from megasharp.evals.samples import ProblemResult
from megasharp.metrics.console import STAGES
from megasharp.metrics.names import NAMES

# Tall enough that charts are visible below the first sentences and the cards of many runs.
DESKTOP, PHONE = (1280, 1800), (390, 844)
KS = (1, 2, 4, 8, 16, 32, 64)
PROBLEMS = 100
# Metrics that are 0 in every step of most runs.
ZERO = ("reward/outcome_timeout", "reward/outcome_infra", "reward/errors", "rollout/aborted", "policy/skipped")
WORDS = ("asked", "finished", "retried", "discarded", "dropped", "trained")


def metric_keys() -> list[str]:
    """Return the keys of the metrics of a step, those of GPUs and of the memory network included."""
    counted = [f"responses/{word}{end}" for word in WORDS for end in ("", "_tokens", "_length_mean", "_length_p90")]
    stages = [f"time/{stage}" for stage in STAGES if stage not in ("start", "eval", "checkpoint")]
    return [*NAMES, *counted, *stages, *(f"candidates/lambda_{n}" for n in (1, 2, 3))]


def make_run(folder: Path, steps: int, seed: int) -> None:
    """Write a run of `steps` steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: {folder.name}\nsteps: {steps}\nseed: {seed}\nmodel: {{path: base}}\n")
    random = np.random.default_rng(seed)
    keys = [key for key in metric_keys() if key != "responses/lengths"]
    walks_TK = 1.0 + np.abs(random.normal(size=(steps, len(keys))).cumsum(axis=0)) / 50
    walks_TK[:, [keys.index(key) for key in ZERO]] = 0.0
    # Each reset and each change of the limit is a vertical line in every chart.
    walks_TK[:, keys.index("policy/reset")] = np.arange(steps) % 2000 == 1000
    walks_TK[:, keys.index("rollout/length_limit")] = np.where(np.arange(steps) < 3000, 1024.0, 2048.0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(walks_TK.tolist(), start=1):
            file.write(json.dumps({"step": step, "time": 1e9 + 30.0 * step, **dict(zip(keys, values, strict=True))}))
            file.write("\n")
    for step in range(0, steps + 1, max(1, steps // 10)):
        correct = random.binomial(64, random.beta(0.4, 1.2, size=PROBLEMS))
        rows = [_problem(place, int(count)) for place, count in enumerate(correct)]
        setting = EvalSetting("countdown_test", folder.name, step, 64, KS, 1.0, seed)
        save(summarize(rows, setting, 1.0), folder / "evals" / f"step_{step:06d}")


def _problem(place: int, correct: int) -> ProblemResult:
    return ProblemResult(f"p{place}", 64, correct, min(correct, 3), 64 - correct, 0, 0, 0, 0, 640, 0, correct > 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--openings", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / f"run_{number}" for number in range(given.runs)]
        for number, folder in enumerate(folders):
            make_run(folder, given.steps, number)
        began = time.perf_counter()
        page = write_report(folders, None)
        seconds = time.perf_counter() - began
        print(f"{given.runs} runs of {given.steps} steps, {len(metric_keys())} metrics a step", flush=True)
        print(f"written in {seconds:.1f} s, {page.stat().st_size / 1e6:.1f} MB")
        for width, height in (DESKTOP, PHONE):
            with chromium(width, height, mobile=width < DESKTOP[0]) as driver:
                times = [opened(driver, page.as_uri()) for _ in range(given.openings)]
                tall = driver.execute_script("return document.documentElement.scrollHeight")
            opening = f"opened in {statistics.median(times) / 1000:.2f} s (slowest {max(times) / 1000:.2f} s)"
            print(f"{width} px wide: {opening}, {tall:,} px high", flush=True)


if __name__ == "__main__":
    main()
