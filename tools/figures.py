"""Run the commands that print the figures of README and docs: those in the tables of docs/explanation/figures.md.

    python tools/figures.py                               # names, what they need, and commands
    python tools/figures.py quickstart gap                # one after the other, into .reports/figures
    python tools/figures.py $(python tools/figures.py --names any) --log day

A command runs in bash, which ends at the first failure, in the repository, with this Python's folder first on the
path, and with as many threads as the machine gives it. `$RUNS` is the folder FOLDER/NAME, which is emptied before;
FOLDER/NAME.log has what the command said. Printed are name, exit code, seconds, and CPU seconds of the processes that
others have waited for, which a run's ranks are not unless there is only one. `--names any` are those that a busy
machine does not change, `--names quiet` the others, both without those that need more than `make install`.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "explanation" / "figures.md"
FOLDER = REPOSITORY / ".reports" / "figures"
# A heading of the page, `## On a quiet machine`, and a line of a table: figures, name, needs, command, takes.
_LINE = re.compile(r"^## On (?:any|a (?P<quiet>quiet)) machine$|^\| .+ \| `(\w+)` \| (.*) \| `([^`|]+)` \| .+ \|$")


@dataclass(frozen=True, slots=True)
class Command:
    """How a group of figures is printed: what that needs beside `make install`, and whether nothing else may run."""

    command: str
    needs: str
    quiet: bool


def read_commands(page: Path = PAGE) -> dict[str, Command]:
    """Read the page's tables, by the figures' names."""
    found: dict[str, Command] = {}
    quiet = False
    for line in map(_LINE.match, page.read_text().splitlines()):
        if line and line[2]:
            found[line[2]] = Command(line[4], line[3], quiet)
        elif line:
            quiet = line["quiet"] is not None
    return found


def main() -> int:
    """List the commands, or run some; returns 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--log", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--names", choices=("any", "quiet"), dest="machine", help="only list names, for such a machine")
    given = parser.parse_args()
    commands = read_commands()
    if unknown := [name for name in given.names if name not in commands]:
        parser.error(f"there are no figures called {unknown[0]}; without a name all are listed")
    if given.machine:
        quiet = given.machine == "quiet"
        print(*(name for name, each in commands.items() if each.quiet == quiet and not each.needs))
    elif not given.names:
        for name, each in commands.items():
            told = ["a quiet machine"] * each.quiet + [each.needs] * bool(each.needs)
            print(f"{name}{': needs ' if told else ''}{'; '.join(told)}\n    {each.command}")
    codes = [run(name, commands[name].command, given.log.resolve()) for name in given.names]
    return int(any(codes))


def run(name: str, command: str, folder: Path) -> int:
    """Run a command, log it, print what it took; returns its exit code."""
    runs, log = folder / name, folder / f"{name}.log"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "RUNS": str(runs)}
    environment.pop("OMP_NUM_THREADS", None)
    before, began = cpu_seconds(), time.monotonic()
    with log.open("w") as stream:
        print(f"$ {command}", file=stream, flush=True)
        done = subprocess.run(
            ["bash", "-ec", command], cwd=REPOSITORY, env=environment, stdout=stream, stderr=stream, check=False
        )
    seconds, cpu = time.monotonic() - began, cpu_seconds() - before
    print(f"{name}: exit code {done.returncode}, {seconds:.0f} s, {cpu:.0f} s of CPU; {log}", flush=True)
    return done.returncode


def cpu_seconds() -> float:
    """User and system seconds of all children that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
