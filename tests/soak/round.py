"""One round of the soak, in namespaces of its own: a run, faults at random times, and what is found at its end.

`python -m tests.soak.round FOLDER KIND NUMBER SEED STEPS [calm]` writes FOLDER/rounds/NUMBER-KIND.json, unless the run
could not even begin. What goes wrong after its first checkpoint is a finding, in the run or in the checks.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from megasharp.checkpoint.recorded import complete_steps
from megasharp.reporting.history import goodput, read_run
from tests.soak import checks, roles
from tests.soak.apart import left
from tests.soak.faults import FAULTS, Target, deck, shift_clock
from tests.soak.runs import FleetRun, SlurmRun, SoakRun

KINDS: dict[str, type[FleetRun] | type[SlurmRun]] = {"fleet": FleetRun, "slurm": SlurmRun}
# The job's engines are in its ranks' own processes.
NOT_THERE = {"fleet": (), "slurm": ("engine killed",)}
_CALM_BETWEEN_S = 8.0
_HANGS_S = 900.0
# Some five times what a round takes beside other work.
_LASTS_S = 7200.0
_GONE_WITHIN_S = 60.0
_STARTS_BY_HAND = 10
# In fewer a single step of the allocator looks like growth.
_STEPS_TO_TELL_GROWTH = 1000


@dataclass
class Round:
    """A round's result, as its file has it.

    `drawn` counts the faults that the kind's deck has given up to its end. `growth` are MB of the driver for 100 steps;
    `files` MB that plan says and that were there.
    """

    kind: str
    number: int
    seed: int
    steps: int
    calm: bool
    commit: str
    minutes: float = 0.0
    attempts: int = 0
    goodput: float | None = None
    drawn: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    growth: float | None = None
    files: dict[str, tuple[float, float]] = field(default_factory=dict)


def file_of(folder: Path, kind: str, number: int) -> Path:
    """Return the file of a round's result."""
    return folder / "rounds" / f"{number:03d}-{kind}.json"


def run_round(folder: Path, result: Round) -> None:
    """Run it and fill in the result."""
    logs = file_of(folder, result.kind, result.number).with_suffix("")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
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
            result.drawn = _drawn_before(folder, result)
            _disturb(target, result, began)
    except Exception as error:
        if not complete_steps(run.root / "checkpoints"):
            raise
        result.findings.append(f"not finished: {type(error).__name__}: {error}")
    finally:
        result.minutes = (time.monotonic() - began) / 60
        _keep(run.root, logs)
        run.close()
    result.by_hand = run.by_hand()
    result.findings += target.findings
    result.findings += [f"needed its user: {end}" for end in result.by_hand if not checks.is_of_full_disk(end)]
    try:
        _look(folder, run, result, logs, samples)
    except Exception as error:
        result.findings.append(f"could not be checked: {type(error).__name__}: {error}")


def _watched(run: SoakRun) -> Callable[[], bool]:
    """`tend`, which ends the round where nothing is recorded for a quarter of an hour, or that lasts too long."""
    metrics = run.root / "metrics.jsonl"
    began = time.monotonic()
    seen = {"size": -1, "since": began}

    def tend() -> bool:
        now, size = time.monotonic(), metrics.stat().st_size if metrics.exists() else 0
        if size != seen["size"]:
            seen.update(size=size, since=now)
        if now - seen["since"] > _HANGS_S or now - began > _LASTS_S:
            raise TimeoutError(
                f"nothing was recorded for {now - seen['since']:.0f} s, {now - began:.0f} s after its start"
            )
        return run.tend()

    return tend


def _observe(target: Target) -> list[tuple[int, float]]:
    """Wait for the end; return steps and resident megabytes of the driver on the way."""
    samples = []
    while target.tend():
        for driver in roles.find("driver"):
            with suppress(psutil.NoSuchProcess, OSError):
                samples.append((len(checks.training_rows(target.root)), driver.memory_info().rss / 2**20))
        target.last(5.0)
    return samples


def _disturb(target: Target, result: Round, began: float) -> None:
    """Draw a pause and a fault, again and again: each once the run has a checkpoint beyond all that it had before.

    Two restarts from one checkpoint are given up by design, so a fault waits for the next. One that finds nobody to hit
    is tried again before others.
    """
    possible = [kind for kind in FAULTS if kind not in NOT_THERE[result.kind]]
    kinds = islice(deck(possible, random.Random(f"{result.seed}-{result.kind}")), result.drawn, None)
    furthest, waiting = 0, list[str]()
    while target.tend():
        newest = max(complete_steps(target.root / "checkpoints"), default=0)
        if newest <= furthest or not roles.find("driver"):
            target.last(0.5)
            continue
        target.last(target.draw.expovariate(1 / _CALM_BETWEEN_S))
        if not target.tend():
            break
        if len(waiting) < 2:
            waiting.append(next(kinds))
            result.drawn += 1
        for kind in tuple(waiting):
            step = len(checks.training_rows(target.root))
            told = FAULTS[kind](target)
            if told is not None:
                waiting.remove(kind)
                at = round(time.monotonic() - began, 1)
                result.faults.append({"seconds": at, "step": step, "kind": kind, "told": told})
                print(f"  {at:7.1f} s  step {step:4d}  {kind}: {told}", flush=True)
                furthest = max(newest, *complete_steps(target.root / "checkpoints"), 0)
                break
        else:
            target.last(1.0)


def _drawn_before(folder: Path, result: Round) -> int:
    """Return what earlier rounds have drawn: those of a kind draw from one deck, so faults come equally often."""
    earlier = (file_of(folder, result.kind, number) for number in range(result.number))
    return max((json.loads(path.read_text())["drawn"] for path in earlier if path.exists()), default=0)


def _keep(root: Path, logs: Path) -> None:
    """Keep the attempts' logs and evaluations of a run whose disk goes."""
    for name in ("logs", "evals"):
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
    calm = folder / f"calm-{result.kind}-{result.steps}.json"
    result.findings += checks.prompts_once(run.root)
    if result.kind == "slurm" and not result.calm:
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
        calm.write_text(json.dumps(checks.history_of(run.root)))


def compile_clock(folder: Path) -> None:
    """Build the library that shifts the wall clock of a run's processes."""
    source = Path(__file__).with_name("shifted_clock.c")
    library = folder / "shifted_clock.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)


def main(arguments: list[str]) -> None:
    """Run the round that the arguments name and write its file."""
    folder, kind, number, seed, steps = Path(arguments[0]), arguments[1], *map(int, arguments[2:5])
    os.environ["OMP_NUM_THREADS"] = "1"
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=checks.REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    result = Round(kind, number, seed, steps, "calm" in arguments[5:], commit)
    run_round(folder, result)
    file_of(folder, kind, number).write_text(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
