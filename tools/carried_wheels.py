"""The wheels that `check_gpu.py --minimal` needs beside `THERE`, a CUDA build of torch, and what these require.

For a machine with Python 3.12 and no network. Versions are those of constraints.txt where they stand there; sizes are
those of the files on PyPI. What a step can do without is `optional`. Only the standard library is imported: this is
read where the rest is missing.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.12"
# pip takes a platform by its exact name.
_PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2014", "1")
ALL = ("kernels", "train", "step", "learner", "head", "step-8b", "engines")
_TESTS = ("kernels", "learner")
# The machine's own: no wheels of them are carried.
THERE = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, and the steps that import it; `kib` on the disk as it travels."""

    name: str
    version: str
    kib: int
    steps: tuple[str, ...] = ALL
    optional: bool = False

    @property
    def there(self) -> str | None:
        """The version that this Python has."""
        return version_here(self.name)


WHEELS = (
    Wheel("megatron-core", "0.19.2", 2316),
    Wheel("pydantic", "2.14.3", 483),
    Wheel("pydantic_core", "2.50.4", 2209),
    Wheel("annotated-types", "0.8.0", 14),
    Wheel("typing-inspection", "0.4.5", 15),
    Wheel("typing_extensions", "4.16.0", 45),
    Wheel("psutil", "7.2.2", 152),
    Wheel("pytest", "9.2.0", 402, _TESTS),
    Wheel("pluggy", "1.7.0", 26, _TESTS),
    Wheel("iniconfig", "2.3.1", 7, _TESTS),
    Wheel("packaging", "26.3", 127),
    Wheel("Pygments", "2.21.0", 1221, _TESTS),
    Wheel("liger-kernel", "0.8.5", 889, ("head",), optional=True),
    Wheel("cut-cross-entropy", "25.1.1", 23, ("head",), optional=True),
)


def version_here(name: str) -> str | None:
    """Return the version of a distribution in this Python; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(steps: Sequence[str]) -> list[str]:
    """Return the names of what one of the steps imports and this Python has not."""
    lacking = [name for name in THERE if version_here(name) is None]
    return lacking + [wheel.name for wheel in needed(steps) if wheel.there is None and not wheel.optional]


def needed(steps: Sequence[str]) -> list[Wheel]:
    """Those that one of the steps imports."""
    return [wheel for wheel in WHEELS if set(wheel.steps) & set(steps)]


def described(steps: Sequence[str]) -> str:
    """Names, versions and sizes, for a line of `--list`."""
    wheels = needed(steps)
    named = [f"{w.name}=={w.version}{' (optional)' if w.optional else ''}" for w in wheels]
    return f"{', '.join(named)}: {sum(wheel.kib for wheel in wheels) / 1024:.1f} MiB"


def compared() -> Iterator[str]:
    """Lines on what this Python lacks of all that the steps import, and on its other versions."""
    yield f"not in this Python: {', '.join(missing(ALL)) or 'none of them is missing'}"
    optional = [wheel.name for wheel in WHEELS if wheel.optional and wheel.there is None]
    if optional:
        yield f"nor, optional: {', '.join(optional)}"
    other = [f"{wheel.name} {wheel.there}" for wheel in WHEELS if wheel.there not in (None, wheel.version)]
    if other:
        yield f"of another version than the wheel: {', '.join(other)}"
    if (here := f"{sys.version_info.major}.{sys.version_info.minor}") != PYTHON:
        yield f"this is Python {here}; the compiled wheels are for {PYTHON}"


def collect(folder: Path) -> int:
    """Download all of them with pip into `folder`, and print how to install them there; pip's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [part for name in _PLATFORMS for part in ("--platform", _platform(name))]
    wanted = [f"{wheel.name}=={wheel.version}" for wheel in WHEELS]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(folder), *wanted),
    ]
    code = subprocess.run(command, check=False).returncode
    files = sorted(folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 2**20:7.2f} MiB  in all, for Python {PYTHON} on x86-64")
    print(f"there: python -m pip install --no-index --no-deps --upgrade --target /tmp/site {folder}/*.whl")
    print("       export PYTHONPATH=/tmp/site")
    return code


def _platform(name: str) -> str:
    return f"manylinux{name}_x86_64" if name in ("1", "2014") else f"manylinux_{name}_x86_64"
