"""What each benchmark of this folder says beside its figures: date, device, versions, commit; one table, one JSON file.

    from results import Figure, report

    figures = [
        Figure("forward", statistics.median(milliseconds), "ms", bar=0.65, repeats=len(milliseconds)),
        Figure("model FLOPs utilization", None, "%", bar=40.0, better="higher", note="needs a GPU"),
    ]
    report("bench_head", figures, settings={"rows": 8192, "vocab": 151936}, packages=("liger-kernel",))

`report` prints the table and writes `tools/results/<benchmark>-<device>.json`, one file a kind of device, so that a run
on a GPU leaves the CPU's figures alone. A figure that this machine cannot give is None and reads "not measured": never
an estimate. A long benchmark calls `keep` with the figures that it has so far: where it is ended, they are on the disk,
with `"complete": false`. With $MEGASHARP_REHEARSAL every table and file says that it is a rehearsal, no measurement.
Benchmarks are run as `python tools/bench_<name>.py`, which puts this folder on the import path.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from limited import REHEARSAL

from megasharp import __version__
from megasharp.cluster.slurm.gpus import opened
from megasharp.common.errors import UserError

# Tests run the benchmarks too, whose figures are nobody's.
FOLDER = Path(os.environ.get("BENCH_RESULTS", Path(__file__).resolve().parent / "results"))
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "numpy")
NOT_MEASURED = "not measured"

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: a median over `repeats` runs in `unit`, None where it was not measured.

    `bar` is what the figure is held against (None: it is only told), met from below or, with `better` "higher", from
    above. `note` says what the reader has to know: which variant, why not measured, why the bar cannot be met.
    """

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    better: Literal["lower", "higher"] = "lower"
    repeats: int = 1
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar or a figure."""
        if self.value is None or self.bar is None:
            return None
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a benchmark ran, at which UTC time.

    `commit` ends in "+" where the working tree had changes; where there is no git it is $COMMIT, else "unknown". A
    `rehearsal` has figures that are nobody's.
    """

    date: str
    device: str
    versions: dict[str, str]
    commit: str
    rehearsal: bool = False


def machine(packages: Sequence[str] = ()) -> Machine:
    """This machine, now; `packages` are distributions to name besides `PACKAGES` (those not installed are left out)."""
    versions = {"python": platform.python_version(), "megasharp": __version__}
    for package in (*PACKAGES, *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # A wheel's metadata may lack what tells CUDA builds apart ("+cu130").
    versions["torch"] = torch.__version__
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    with suppress(UserError), opened() as nvml:
        versions["driver"] = nvml.read().driver
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Machine(date, device(), versions, _commit(), rehearsal=REHEARSAL in os.environ)


def device() -> str:
    """The accelerators, where there are some, and the CPU, with how many of its cores this process may use."""
    cpu = f"{_cpu()}, {len(os.sched_getaffinity(0))} cores"
    if not torch.cuda.is_available():
        return cpu
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {cpu}"


def table(figures: Sequence[Figure], where: Machine) -> str:
    """The machine, then a line for each figure with its bar."""
    rows = [("figure", "median", "unit", "bar", "met", "repeats", "note")]
    for figure in figures:
        sign = "<=" if figure.better == "lower" else ">="
        rows.append(
            (
                figure.name,
                NOT_MEASURED if figure.value is None else _number(figure.value),
                figure.unit,
                "" if figure.bar is None else f"{sign} {_number(figure.bar)}",
                {None: "", True: "yes", False: "NO"}[figure.met],
                "" if figure.value is None else str(figure.repeats),
                figure.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    marked = ["REHEARSAL: no figure below is a measurement"] if where.rehearsal else []
    return "\n".join([*marked, f"{where.date}  {where.device}  commit {where.commit}", versions, *lines])


def unusual(parser: argparse.ArgumentParser, arguments: argparse.Namespace, among: Sequence[str]) -> str:
    """Those of `among` that are not the command's defaults, with their values: a `subject` for `report`."""
    values = {name: getattr(arguments, name) for name in among}
    return " ".join(f"{name} {value}" for name, value in values.items() if value != parser.get_default(name))


def report(
    benchmark: str,
    figures: Sequence[Figure],
    settings: Mapping[str, Setting],
    packages: Sequence[str] = (),
    folder: Path = FOLDER,
    subject: str = "",
) -> Path:
    """Print the table and write the JSON file; returns its path.

    What is measured of several things names the one, so that one's figures do not replace another's.

    `settings` are the sizes that the figures belong to: all that is needed to measure them again.
    """
    where = machine(packages)
    print(table(figures, where))
    path = keep(benchmark, figures, settings, where, folder, subject, complete=True)
    print(f"written to {path}")
    return path


def keep(
    benchmark: str,
    figures: Sequence[Figure],
    settings: Mapping[str, Setting],
    where: Machine,
    folder: Path = FOLDER,
    subject: str = "",
    complete: bool = False,
) -> Path:
    """Write the JSON file of a benchmark, which is not `complete` before its end, and print nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    marked = "rehearsal" if where.rehearsal else ""
    path = folder / f"{'-'.join(filter(None, (marked, benchmark, _slug(subject), _slug(_device()))))}.json"
    record = {
        "benchmark": benchmark,
        **asdict(where),
        "complete": complete,
        "file": path.name,
        "settings": dict(settings),
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _commit() -> str:
    def git(*arguments: str) -> str:
        here = str(Path(__file__).parent)
        return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
