"""One round of the soak, in namespaces of its own: a run, faults at random times, and what is found at its end.

`python -m tests.soak.round FOLDER KIND NUMBER SEED STEPS [calm]` writes FOLDER/rounds/NUMBER-KIND.json.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from megasharp.reporting.history import goodput, read_run
from tests.soak import checks, roles
from tests.soak.apart import left
from tests.soak.faults import FAULTS, Target, deck, shift_clock
from tests.soak.runs import FleetRun, SlurmRun, SoakRun, newest_checkpoint, training_rows

KINDS: dict[str, type[FleetRun] | type[SlurmRun]] = {"fleet": FleetRun, "slurm": SlurmRun}
# The job has engines in its ranks' own processes.
_NOT_THERE = {"fleet": (), "slurm": ("engine killed",)}
_CALM_BETWEEN_S = 8.0
_HANGS_S = 900.0
# In fewer a single step of the allocator looks like growth.
_STEPS_TO_TELL_GROWTH = 1000
_GONE_WITHIN_S = 60.0


@dataclass
class Round:
    """A round's result. `growth`: MB of the driver for 100 steps; `files`: MB that plan says and that were there."""

    kind: str
    number: int
    seed: int
    steps: int
    calm: bool
    minutes: float = 0.0
    attempts: int = 0
    goodput: float | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    pass_at_k: dict[str, float] = field(default_factory=dict)
    growth: float | None = None
    files: dict[str, tuple[float, float]] = field(default_factory=dict)


def file_of(folder: Path, kind: str, number: int) -> Path:
    """Return the file of a round's result."""
    return folder / "rounds" / f"{number:03d}-{kind}.json"


def run_round(folder: Path, result: Round) -> None:
    """Run it and fill in the result."""
    logs = file_of(folder, result.kind, result.number).with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    clock = folder / "clock"
    shift_clock(clock, 0)
    library = folder / "shifted_clock.so"
    preloaded = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(clock), "WANDB_MODE": "offline"}
    began = time.monotonic()
    run: SoakRun = KINDS[result.kind](folder / "disk", logs, result.steps, preloaded)
    draw = random.Random(f"{result.seed}-{result.kind}-{result.number}")
    target = Target(run.root, folder / "disk", clock, folder / "disk" / "copies", draw, _watched(run))
    samples: list[tuple[int, float]] = []
    try:
        if result.calm:
            samples = _observe(target)
        else:
            _disturb(target, result, began, _drawn_before(folder, result))
        result.minutes = (time.monotonic() - began) / 60
        result.by_hand = run.by_hand()
        result.findings += target.findings
    finally:
        _keep(run.root, logs)
        run.close()
    _look(folder, run, result, logs, samples)


def _watched(run: SoakRun) -> Any:
    """`tend`, and an end with all stacks where nothing is recorded for a quarter of an hour."""
    seen = {"rows": -1, "since": time.monotonic()}

    def tend() -> bool:
        rows = (run.root / "metrics.jsonl").stat().st_size if (run.root / "metrics.jsonl").exists() else 0
        if rows != seen["rows"]:
            seen.update(rows=rows, since=time.monotonic())
        if time.monotonic() - seen["since"] > _HANGS_S:
            raise TimeoutError(f"nothing was recorded for {_HANGS_S:g} s")
        return run.tend()

    return tend


def _observe(target: Target) -> list[tuple[int, float]]:
    """Wait for the end; return steps and resident megabytes of the driver on the way."""
    samples = []
    while target.tend():
        for driver in roles.find("driver"):
            try:
                samples.append((len(training_rows(target.root)), driver.memory_info().rss / 2**20))
            except psutil.NoSuchProcess:
                continue
        target.last(5.0)
    return samples


def _disturb(target: Target, result: Round, began: float, drawn: int) -> None:
    """Draw a pause and a fault, again and again: each once the run has a checkpoint that it had not at the last one.

    Two restarts from one checkpoint are given up by design, so a fault waits for the next.
    """
    possible = [kind for kind in FAULTS if kind not in _NOT_THERE[result.kind]]
    kinds = islice(deck(possible, random.Random(f"{result.seed}-{result.kind}")), drawn, None)
    before = ""
    while target.tend():
        newest = newest_checkpoint(target.root)
        if newest in ("", before) or not roles.find("driver"):
            target.last(0.5)
            continue
        target.last(target.draw.expovariate(1 / _CALM_BETWEEN_S))
        if not target.tend():
            break
        kind = next(kinds)
        step = len(training_rows(target.root))
        told = FAULTS[kind](target)
        if told is None:
            continue
        at = round(time.monotonic() - began, 1)
        result.faults.append({"seconds": at, "step": step, "kind": kind, "told": told})
        print(f"  {at:7.1f} s  step {step:4d}  {kind}: {told}", flush=True)
        before = newest_checkpoint(target.root)


def _drawn_before(folder: Path, result: Round) -> int:
    """Count the faults of earlier rounds of the kind: all draw from one deck, so that each comes equally often."""
    earlier = (file_of(folder, result.kind, number) for number in range(result.number))
    return sum(len(json.loads(path.read_text())["faults"]) for path in earlier if path.exists())


def _keep(root: Path, logs: Path) -> None:
    """Keep the attempts' logs and evaluations of a run whose disk goes."""
    for name in ("logs", "evals"):
        shutil.rmtree(logs / name, ignore_errors=True)
        if (root / name).exists():
            shutil.copytree(root / name, logs / name, symlinks=True)


def _look(folder: Path, run: SoakRun, result: Round, logs: Path, samples: list[tuple[int, float]]) -> None:
    """Compare what is left of the run with what has to be."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (rest := left()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if rest:
        result.findings.append(f"left behind: {asdict(rest)}")
    found = read_run(run.root)
    # Useful time by the run's own account; the wall time by a clock that does not jump.
    result.attempts, result.goodput = len(found.attempts), goodput(found).useful / (60 * result.minutes)
    result.findings += checks.steps_once(run.root, result.steps)
    evaluated = [row for row in found.rows if any(name.startswith("eval/") for name in row)]
    if evaluated:
        result.pass_at_k = {name: float(value) for name, value in evaluated[-1].items() if "/pass@" in name and value}
    calm = folder / f"calm-{result.kind}-{result.steps}.json"
    if result.kind == "fleet":
        result.findings += checks.prompts_once(run.root)
    elif not result.calm or calm.exists():
        result.findings += checks.same_history(run.root, json.loads(calm.read_text()))
    copy = folder / "disk" / "copies" / run.root.name
    result.findings += checks.of_copy(copy, run, logs / "copy.log", resume=result.kind == "slurm")
    if result.calm:
        if result.steps >= _STEPS_TO_TELL_GROWTH:
            result.growth = checks.memory_growth(samples)
            if result.growth > checks.MB_PER_100_STEPS:
                result.findings.append(f"the driver grew by {result.growth:.2f} MB per 100 steps")
        result.files = checks.files_against_plan(run, run.root)
        result.findings += checks.larger_than_planned(result.files)
        (logs / "memory.json").write_text(json.dumps(samples))
        parts = {
            "rows": checks.history(run.root),
            "groups": checks.groups(run.root),
            "weights": checks.weights(run.root),
        }
        calm.write_text(json.dumps(parts))


def compile_clock(folder: Path) -> None:
    """Build the library that shifts the wall clock of a run's processes."""
    source = Path(__file__).with_name("shifted_clock.c")
    library = folder / "shifted_clock.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)


def main(arguments: list[str]) -> int:
    folder, kind, number, seed, steps = Path(arguments[0]), arguments[1], *map(int, arguments[2:5])
    os.environ["OMP_NUM_THREADS"] = "1"
    result = Round(kind, number, seed, steps, calm="calm" in arguments[5:])
    try:
        run_round(folder, result)
    except (Exception, KeyboardInterrupt) as error:
        # A round that the harness itself could not finish is told as such, and repeated.
        print(f"round {number} was not finished: {type(error).__name__}: {error}", flush=True)
        raise
    file_of(folder, kind, number).write_text(json.dumps(asdict(result), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
