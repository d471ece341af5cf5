"""`make test-soak`, or `python -m tests.soak [--minutes 60] [--seed N] [--folder F]`: rounds until the time is used up.

Each round is a whole run under random faults: over SGLang engines under Ray and under Slurm, in turn; four undisturbed
ones, which they are compared with, come on top. The
folder keeps a file for each round that came to its end, so that the same command goes on where it was stopped. Needs
root, `.ci/packages` and `make fleet`. Exit code 1 where something was found that must not be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from megasharp.common.files import held
from tests.soak.apart import run_apart
from tests.soak.round import KINDS, Round, compile_clock, file_of
from tests.soak.table import compare_pass_at_k, table

FOLDER = Path(".reports/soak")
# The steps of a round take some 5 and 3 minutes on two cores without a fault, those of a long one 24 and 16.
STEPS = {"fleet": 220, "slurm": 440}
LONG = {"fleet": 1100, "slurm": 2200}
# Numbers of rounds with faults begin here; those before are of undisturbed ones.
_FIRST = 10
_LONG = 5
_CALM_FLEET_ROUNDS = 3
_TRIES = 3


def main() -> int:
    """Run rounds; print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Train under random faults.")
    parser.add_argument("--minutes", type=float, default=60.0, help="of rounds with faults, in all [60]")
    parser.add_argument("--seed", type=int, help="of the faults [drawn, then kept in the folder]")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of rounds [{FOLDER}]")
    parser.add_argument("--long", action="store_true", help="also run undisturbed for long, for the driver's memory")
    given = parser.parse_args()
    folder = given.folder.resolve()
    (folder / "rounds").mkdir(parents=True, exist_ok=True)
    with held(folder, f"{folder} is in use by another soak"):
        return _soak(folder, _seed(folder, given.seed), given.minutes, long=given.long)


def _soak(folder: Path, seed: int, minutes: float, *, long: bool) -> int:
    print(f"soak with --seed {seed} in {folder}", flush=True)
    if rounds(folder):
        print("it goes on after the rounds there; remove the folder to begin anew", flush=True)
    compile_clock(folder)
    # The job is compared with its undisturbed run as soon as it ends, the other with several when all are done.
    _finish(folder, "slurm", 0, seed, STEPS["slurm"], calm=True)
    number = _FIRST
    while sum(one.minutes for one in rounds(folder) if not one.calm) < minutes:
        kind = tuple(KINDS)[number % len(KINDS)]
        _finish(folder, kind, number, seed, STEPS[kind], calm=False)
        number += 1
    for calm in range(_CALM_FLEET_ROUNDS):
        _finish(folder, "fleet", calm, seed, STEPS["fleet"], calm=True)
    if long:
        for kind, steps in LONG.items():
            _finish(folder, kind, _LONG, seed, steps, calm=True)
    done = rounds(folder)
    compared, findings = compare_pass_at_k(folder, done, STEPS["fleet"])
    text = "\n".join([*table(done), "", *compared, *(f"- {finding}" for finding in findings)])
    (folder / "table.md").write_text(text + "\n")
    print(text)
    return int(bool(findings) or any(one.findings for one in done))


def _seed(folder: Path, given: int | None) -> int:
    kept = folder / "seed"
    if not kept.exists():
        kept.write_text(str(random.SystemRandom().randrange(10**8) if given is None else given))
    seed = int(kept.read_text())
    if given not in (None, seed):
        sys.exit(f"{folder} has rounds of --seed {seed}; give another --folder")
    return seed


def _finish(folder: Path, kind: str, number: int, seed: int, steps: int, *, calm: bool) -> None:
    """Run a round if its file is not there. One that the harness could not finish is run again."""
    for _ in range(_TRIES):
        if file_of(folder, kind, number).exists():
            return
        print(f"round {number}, {kind}, {steps} steps{', undisturbed' * calm}", flush=True)
        arguments = [str(folder), kind, str(number), str(seed), str(steps), *["calm"] * calm]
        run_apart([sys.executable, "-m", "tests.soak.round", *arguments], folder)
        if file_of(folder, kind, number).exists():
            for finding in json.loads(file_of(folder, kind, number).read_text())["findings"]:
                print(f"  FOUND: {finding}", flush=True)
    if not file_of(folder, kind, number).exists():
        sys.exit(f"round {number} was not finished in {_TRIES} tries")


def rounds(folder: Path) -> list[Round]:
    """Read the rounds that are done, in order."""
    return [Round(**json.loads(path.read_text())) for path in sorted((folder / "rounds").glob("*.json"))]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on after the last whole round")
