"""Resolve the requirements of the two GPU environments, and compare what comes out with the committed locks.

    python tools/locks.py                       # changes nothing; the slice `resolve`
    python tools/locks.py --write [--upgrade]   # writes requirements/*.txt, newer versions with --upgrade

Needs PyPI, and uv in the Python that runs it. The target is Linux x86_64 with CPython 3.12, whatever machine this is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "requirements"
# SGLang's wheel is for glibc 2.34.
TARGET = ("--python-platform", "x86_64-manylinux_2_34", "--python-version", "3.12")


@dataclass(frozen=True, slots=True)
class Environment:
    """One of the two: `inputs` are uv's, relative to the repository."""

    name: str
    inputs: tuple[str, ...]

    @property
    def lock(self) -> Path:
        """File of exact versions, all of them wheels on PyPI."""
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def apart(self) -> Path:
        """File of exact versions that PyPI alone cannot install."""
        return REQUIREMENTS / f"{self.name}-apart.txt"


ENVIRONMENTS = (
    Environment("trainer", ("pyproject.toml", "requirements/trainer.in")),
    Environment("engines", ("requirements/engines.in",)),
)


class Failed(Exception):
    """A lock that cannot be installed, or is not what its input gives; the message says which and why."""


def pins(text: str) -> dict[str, str]:
    """Return version by package, of a lock's text."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def compile_lock(one: Environment, into: Path, *options: str) -> None:
    """Resolve into the file `into`, whose versions are kept where they still fit. Raises Failed."""
    apart = [option for name in pins(one.apart.read_text()) for option in ("--no-emit-package", name)]
    command = ["compile", *one.inputs, "-c", str(one.apart), *apart, "-o", str(into), *TARGET, "--no-annotate"]
    _uv(one, *command, "--no-header", *options)


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Name the packages whose version differs, with both versions."""
    return [
        f"{name} {before.get(name, 'not there')} -> {now.get(name, 'not there')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def check(one: Environment) -> int:
    """Return the number of packages in the lock. Raises Failed where it is stale or cannot be installed from PyPI."""
    with tempfile.TemporaryDirectory() as folder:
        if not one.lock.is_file():
            raise Failed("it is missing; run python tools/locks.py --write")
        fresh = Path(shutil.copy(one.lock, folder))
        compile_lock(one, fresh)
        before, now = pins(one.lock.read_text()), pins(fresh.read_text())
        if changed := differences(before, now):
            raise Failed(f"its input now gives {', '.join(changed)}; run python tools/locks.py --write")
        target = ("--target", folder, *TARGET)
        said = _uv(one, "install", "--dry-run", "--no-deps", "--only-binary", ":all:", *target, "-r", str(one.lock))
    if yanked := [line for line in said.splitlines() if "is yanked" in line]:
        raise Failed("; ".join(yanked))
    return len(now)


def _uv(one: Environment, *arguments: str) -> str:
    """Run `uv pip`; returns what it wrote to standard error. Raises Failed."""
    # Metadata is read, nothing is built: any Python will do.
    variables = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "uv", "pip", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"uv pip {arguments[0]} of {one.name}: {done.stderr.strip()}")
    return done.stderr


def main(arguments: Sequence[str]) -> int:
    """Write or check both locks; returns 0 where all is well."""
    parser = argparse.ArgumentParser(description="Resolve the requirements of the GPU environments.")
    parser.add_argument("--write", action="store_true", help="write requirements/*.txt")
    parser.add_argument("--upgrade", action="store_true", help="with --write: take newer versions")
    asked = parser.parse_args(arguments)
    failed = False
    for one in ENVIRONMENTS:
        try:
            if asked.write:
                compile_lock(one, one.lock, *(["--upgrade"] if asked.upgrade else []))
            print(f"{one.lock.relative_to(REPOSITORY)}: {check(one)} packages, all on PyPI as wheels", flush=True)
        except Failed as error:
            failed = True
            print(f"{one.lock.relative_to(REPOSITORY)}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
