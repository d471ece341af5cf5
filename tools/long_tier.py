"""Run the long test tier: every slice, slices by name, or those that a commit owes.

    python tools/long_tier.py                  # all
    python tools/long_tier.py fleet slurm      # these two
    python tools/long_tier.py --due            # as CI does

`.ci/slices` lists the slices: their tests, the folders that each guards, and the date and the minutes of the last run
in which all of its tests passed, which this program writes. Due are the slices whose folders changed since the newest
commit older than 24 hours, and the one that was green longest ago, as many as fit in 18 minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SLICES = REPOSITORY / ".ci" / "slices"
REPORTS = REPOSITORY / ".reports"
DUE_MINUTES = 18.0


@dataclass(frozen=True)
class Slice:
    """One table of `.ci/slices`.

    `tests` are pytest's paths, of which the tests marked `long("NAME")` run, two files at a time or as many as
    `workers` says; `program` is run in their place where it is given. `make` names what make must build first.
    """

    name: str
    guards: tuple[str, ...]
    minutes: float
    green: date
    tests: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    make: tuple[str, ...] = ()
    workers: int = 2

    def guarded(self, paths: Iterable[str]) -> list[str]:
        """Return the paths below the folders that it guards, its own tests among them."""
        roots = (*self.guards, *self.tests, *self.program[:1])
        return [path for path in paths if any(path == root or path.startswith(f"{root}/") for root in roots)]


@dataclass(frozen=True)
class Choice:
    """A slice, whether it runs now, and why."""

    slice: Slice
    taken: bool
    reason: str


def read_slices(file: Path = SLICES) -> dict[str, Slice]:
    """Read `.ci/slices`, in its order."""
    tables: Mapping[str, Mapping[str, object]] = tomllib.loads(file.read_text())
    return {
        name: Slice(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})  # type: ignore[arg-type]
        for name, table in tables.items()
    }


def choose(slices: Sequence[Slice], changed: Sequence[str], commit: str, minutes: float = DUE_MINUTES) -> list[Choice]:
    """Say of every slice whether it is due at a commit, in the order in which they run.

    The slice that was green longest ago has its place kept, so that each has its turn however much changes, as long as
    the dates of green runs are committed; slices of one date are drawn by the commit.
    """

    def age(one: Slice) -> tuple[date, str]:
        return one.green, hashlib.sha256(f"{commit} {one.name}".encode()).hexdigest()

    oldest, *others = sorted(slices, key=age)
    left = minutes - oldest.minutes
    choices = []
    for one in others:
        touched = one.guarded(changed)
        fits = bool(touched) and one.minutes <= left
        left -= one.minutes if fits else 0.0
        reason = f"{touched[0]} changed" if touched else "nothing that it guards changed"
        if touched and not fits:
            reason += f", but its {one.minutes:g} minutes do not fit"
        choices.append(Choice(one, fits, reason))
    return [*choices, Choice(oldest, True, f"green longest ago, on {oldest.green}")]


def changed_files() -> tuple[list[str], str]:
    """Return the files that differ from the newest commit older than 24 hours (all, without one), and HEAD's hash."""
    head, base = _git("rev-parse", "HEAD"), _git("rev-list", "-1", "--before=24 hours ago", "HEAD")
    paths = _git("diff", "--name-only", "--no-renames", base, head) if base else _git("ls-files")
    return paths.splitlines(), head


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()


def run(one: Slice) -> int:
    """Build what a slice needs and run it; records date and minutes where it passes. Returns its exit code."""
    for target in one.make:
        code = subprocess.run(["make", target], cwd=REPOSITORY, check=False).returncode
        if code:
            print(f"slice {one.name}: make {target} failed with exit code {code}", flush=True)
            return code
    command = [sys.executable, *one.program] if one.program else _pytest(one)
    began = time.monotonic()
    code = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    minutes = (time.monotonic() - began) / 60
    print(f"slice {one.name}: {'green' if not code else f'exit code {code}'} after {minutes:.1f} minutes", flush=True)
    if not code:
        record(one.name, math.ceil(minutes), date.today())
    return code


def _pytest(one: Slice) -> list[str]:
    command = [sys.executable, "-m", "pytest", *one.tests, "-m", "long", "--slice", one.name, "-rs"]
    command += [f"--junitxml={REPORTS / one.name}.xml"]
    return command + (
        ["-n", str(one.workers), "--dist", "loadfile", "--no-loadscope-reorder"] if one.workers > 1 else []
    )


def record(name: str, minutes: float, today: date, file: Path = SLICES) -> None:
    """Write a green run's date and minutes into the table `[name]` of the slices' file."""

    def renewed(table: re.Match[str]) -> str:
        text = re.sub(r"^minutes = .*$", f"minutes = {minutes:g}", table[0], flags=re.MULTILINE)
        return re.sub(r"^green = .*$", f"green = {today.isoformat()}", text, flags=re.MULTILINE)

    file.write_text(re.sub(rf"^\[{re.escape(name)}\]\n(?:(?!\[).*\n?)*", renewed, file.read_text(), flags=re.MULTILINE))


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; returns 0 where all of it passed."""
    parser = argparse.ArgumentParser(description="Run slices of the long test tier.")
    parser.add_argument("names", nargs="*", help="slices of .ci/slices; all without a name")
    parser.add_argument("--due", action="store_true", help="those that a commit owes, as CI does")
    asked = parser.parse_args(arguments)
    slices = read_slices()
    unknown = sorted(set(asked.names) - slices.keys())
    if unknown:
        sys.exit(f"no slice {', '.join(unknown)}; there are {', '.join(slices)}")
    chosen = [slices[name] for name in asked.names] or [*slices.values()]
    if asked.due:
        choices = choose([*slices.values()], *changed_files())
        for choice in choices:
            print(f"slice {choice.slice.name}: {'runs' if choice.taken else 'left out'}: {choice.reason}", flush=True)
        chosen = [choice.slice for choice in choices if choice.taken]
    failed = [one.name for one in chosen if run(one)]
    if failed:
        print(f"not green: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
