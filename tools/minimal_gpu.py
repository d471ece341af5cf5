"""The first half hour on a GPU, in steps of at most ten minutes; the most valuable come first.

    python tools/check_gpu.py --minimal --list               # steps, their limits, the wheels that they need
    python tools/check_gpu.py --minimal --wheels DIR         # collects those wheels; the machine needs no network
    python tools/check_gpu.py --minimal --minutes 9          # as many steps as fit, in this order
    python tools/check_gpu.py --minimal step head            # these
    python tools/check_gpu.py --minimal --rehearse           # the same on a CPU: tiny sizes, no measurement
    python tools/check_gpu.py --minimal --unpack summary.json     # its benchmarks' files into tools/results

It needs Python 3.12, a CUDA build of torch (2.11 is enough), Triton and transformers 5, with what these require, and
the wheels; no installation of megasharp, and no pyarrow. `--list`, `--wheels` and `--unpack` need the standard library
alone. Models are made here with random weights. Everything that is to be kept is in two files of `--out`:
`summary.json`, which has an entry more after each command, and `log.txt`; steps may be given one by one with the same
`--out`. A command that fails or meets its limit leaves the figures that it has so far. Exit code 1 where one failed, 2
without a GPU or where a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import carried_wheels
from limited import NOT_TRIED, REHEARSAL, REPOSITORY, Check, end_by_exception, ended, tool

_OUTPUT_LINES = 12
_VERSIONS = ("transformers", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
# Seconds; with less left a command would be ended before it has anything.
_LEAST_S = 30.0
# A rehearsal is to end well on a busy CPU; its seconds say nothing.
_LIMITS_OF_REHEARSAL = 5
_SUMMARY, _LOG, _RESULTS = "summary.json", "log.txt", "results"
_TESTS = re.compile(r"^(\S*tests/gpu/\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_NO_TIME = "left out: no time"
_NOT_FAILED = ("ok", "not tried", _NO_TIME)


@dataclass(frozen=True, slots=True)
class Step:
    """Some commands on one question; `about` is a line for the user."""

    name: str
    about: str
    checks: tuple[Check, ...]

    @property
    def limit_s(self) -> float:
        """That of all commands together."""
        return sum(check.limit_s for check in self.checks)


def steps(out: Path, rehearsal: bool) -> list[Step]:
    """All steps for this machine, in the order of their value."""
    made = [
        Step("kernels", "tests of the head's and attention's kernels against float64", (
            _tests("kernels", 300, "test_head.py", "test_attention.py"),
        )),
        Step("train", "a run with DLC, KL and its own engine; saved, ended, resumed", (_smoke("learner", out, 360),)),
        Step("step", "a training step of 1.7B and 4B, with each attention that is installed", _train_steps(rehearsal)),
        Step("learner", "sync to another process, a learner's steps bit for bit in two processes, its variants", (
            # CUDA's handles have no stand-in; `sync-speed` sends weights on a CPU too.
            *(() if rehearsal else (_tests("sync", 90, "test_sync.py"),)),
            _tests("determinism", 180, "test_determinism.py"),
            _tests("learner", 210, "test_learner.py"),
        )),
        Step("head", "the head beside other libraries, then its tiles", (
            Check("head", tool("bench_head"), 180),
            # Without CUDA there are no tiles.
            *(() if rehearsal else (Check("head-tuning", tool("bench_head", "--tune", "--repeats", "10"), 180),)),
            Check("sync-speed", tool("bench_sync", "--model", *_model("qwen3-1.7b", rehearsal)), 90),
        )),
        Step("step-8b", "a training step of 8B, its optimizer's state in the host's memory (98 GB)", (
            _step("step-8b", "qwen3-8b", rehearsal, 600, "--optimizer-offload", "--recompute", "full"),
        )),
        Step("engines", "an SGLang engine: composite DLC, CUDA graphs, sleep and wake, weights by handles; optional", (
            _smoke("engines", out, 480),
        )),
    ]  # fmt: skip
    return [_rehearsed(step) for step in made] if rehearsal else made


def _tests(name: str, limit_s: float, *files: str) -> Check:
    # A line for each test (the project asks for -q), so that an early end says which were well.
    options = ("-vv", "-rs", "-p", "no:cacheprovider", "-W", "ignore")
    return Check(name, ("-m", "pytest", *options, *(f"tests/gpu/{file}" for file in files)), limit_s)


def _smoke(part: str, out: Path, limit_s: float) -> Check:
    return Check(f"run-{part}", tool("minimal_gpu", "--smoke", part, "--out", str(out)), limit_s)


def _model(name: str, rehearsal: bool) -> tuple[str, ...]:
    """A benchmark's model: of a rehearsal the quickstart's, in float32."""
    return ("quickstart", "--dtype", "float32") if rehearsal else (name,)


def _step(name: str, model: str, rehearsal: bool, limit_s: float, *arguments: str) -> Check:
    short = ("--steps", "3", "--warm-up", "1", "--micro-batches", "2", "--head", "chunked", "--random-init")
    small = ("--tokens", "256", "--prompt", "16", "--response", "32") if rehearsal else ()
    return Check(name, tool("bench_step", "--model", *_model(model, rehearsal), *short, *small, *arguments), limit_s)


def _train_steps(rehearsal: bool) -> tuple[Check, ...]:
    # `megasharp plan` counts 55 GB for 1.7B and 81 for 4B, of the 85 GB of an H100; 8B has its optimizer on the host.
    recompute = {"qwen3-1.7b": "none", "qwen3-4b": "full"}
    return tuple(
        _step(f"{model}-{name}", model, rehearsal, limit_s, "--recompute", recompute[model], *_attention(name))
        for model, limit_s in (("qwen3-1.7b", 90.0), ("qwen3-4b", 110.0))
        for name in kernels_here()
    )


def _attention(name: str) -> tuple[str, ...]:
    # On a CPU there is one kind, and no choice.
    return ("--attention", name) if has_gpu() else ()


def has_gpu() -> bool:
    """Return whether there is a torch here that finds a GPU."""
    if carried_wheels.version_here("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def kernels_here() -> list[str]:
    """The attention kernels that are installed and serve this card; FA2, which is torch's own, without one."""
    if not has_gpu():
        return ["fa2"]
    import torch

    from megasharp.ops import attention_kernels as kernels

    site = kernels.Site(gpu=True, dtype="bfloat16", head_dims=(128,), capability=torch.cuda.get_device_capability())
    software = kernels.software_here()
    return [name for name in get_args(kernels.FlashName) if not kernels.refusal(name, site, software)]


def _rehearsed(step: Step) -> Step:
    checks = tuple(
        replace(check, limit_s=check.limit_s * _LIMITS_OF_REHEARSAL, variables={REHEARSAL: "1"})
        for check in step.checks
    )
    return replace(step, checks=checks)


class Summary:
    """`summary.json`: an entry for each command that ran in this folder, the latest last.

    It says where, when and with what it ran, how it ended, its tests and its benchmarks.
    """

    def __init__(self, out: Path, rehearsal: bool) -> None:
        self._out, self._rehearsal = out, rehearsal
        file = out / _SUMMARY
        self.entries: list[dict[str, Any]] = json.loads(file.read_text())["checks"] if file.is_file() else []
        self._seen: dict[Path, int] = {}
        # Those of earlier commands are theirs.
        list(self._new())

    def add(self, step: str, check: str, how: str, seconds: float, output: str) -> None:
        """Add a command that has ended; what it has left in `results` since the one before belongs to it."""
        from results import machine

        where = {**asdict(machine(_VERSIONS)), "rehearsal": self._rehearsal}
        entry: dict[str, Any] = {"step": step, "check": check, **where, "ended": how, "seconds": round(seconds, 1)}
        if how == "not tried":
            entry["why"] = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        tests = _TESTS.findall(output)
        if tests:
            entry["tests"] = {kind.lower(): sum(each == kind for _, each in tests) for kind in ("PASSED", "SKIPPED")}
            entry["tests"]["failed"] = [name for name, kind in tests if kind in ("FAILED", "ERROR")]
        entry["benchmarks"] = [json.loads(path.read_text()) for path in self._new()]
        self.entries.append(entry)
        self._write()

    def _new(self) -> Iterator[Path]:
        for path in sorted((self._out / _RESULTS).glob("*.json")):
            written = path.stat().st_mtime_ns
            if self._seen.get(path) != written:
                self._seen[path] = written
                yield path

    def _write(self) -> None:
        path = self._out / _SUMMARY
        path.with_suffix(".new").write_text(json.dumps({"checks": self.entries}, indent=1) + "\n")
        path.with_suffix(".new").replace(path)


def run(wanted: Sequence[Step], out: Path, rehearsal: bool, minutes: float | None) -> int:
    """Run the steps one after another within `minutes`; 1 where a command failed."""
    end_by_exception()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["BENCH_RESULTS"] = str(out / _RESULTS)
    deadline = time.monotonic() + (minutes * 60 if minutes is not None else float("inf"))
    summary, log = Summary(out, rehearsal), out / _LOG
    earlier = len(summary.entries)
    for step in wanted:
        for check in step.checks:
            left = deadline - time.monotonic()
            if left < _LEAST_S:
                summary.add(step.name, check.name, _NO_TIME, 0.0, "")
                continue
            begin = log.stat().st_size if log.is_file() else 0
            how, seconds = ended(check, log, left)
            output = log.read_bytes()[begin:].decode(errors="replace")
            summary.add(step.name, check.name, how, seconds, output)
            print(f"--- {step.name}, {check.name}: {how}, {seconds:.0f} s", flush=True)
            print("\n".join(output.splitlines()[-_OUTPUT_LINES:]), flush=True)
    print("\n".join(lines(summary.entries)))
    print(f"{out / _SUMMARY} and {out / _LOG} have all of it")
    return int(any(entry["ended"] not in _NOT_FAILED for entry in summary.entries[earlier:]))


def lines(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each command, with its tests and the first figures of its benchmarks, under where they ran."""
    place = None
    for entry in entries:
        versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        if place != (place := (entry["rehearsal"], entry["device"], entry["commit"], versions)):
            yield ""
            if entry["rehearsal"]:
                yield "REHEARSAL: no figure below is a measurement"
            yield f"{entry['device']}, commit {entry['commit']}, {versions}"
        yield f"{entry['check']:<16} {entry['seconds']:7.1f} s  {entry['ended']}{_told(entry)}"


def _told(entry: dict[str, Any]) -> str:
    said = f": {entry['why']}" if "why" in entry else ""
    if "tests" in entry:
        tests = entry["tests"]
        said += f"; {tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"
    for record in entry["benchmarks"]:
        named = {figure["name"]: figure for figure in record["figures"] if figure["value"] is not None}
        shown = [
            name for name in ("step", "update", "MFU", "peak memory", "ours: forward", "lent, later") if name in named
        ]
        said += "".join(f"; {name} {named[name]['value']:.3g} {named[name]['unit']}" for name in shown)
        said += "" if record["complete"] else " (so far)"
    return said


def smoke(part: str, out: Path) -> int:
    """One part of `megasharp doctor --gpu-smoke`, in a folder of this call; `NOT_TRIED` where it is not installed."""
    from megasharp.trainer.gpu_smoke import smoke as run_smoke

    folder = out.absolute() / f"runs_{datetime.now():%H%M%S}"
    (outcome,) = run_smoke(folder, "cpu" if REHEARSAL in os.environ else "cuda", (part,))
    print(f"{outcome.part}: {outcome.how}: {outcome.text}")
    return {"ok": 0, "note": NOT_TRIED, "FAIL": 1}[outcome.how]


def unpack(summary: Path) -> int:
    """Write the benchmarks' files of a summary to tools/results, as they would be had they run here."""
    folder = REPOSITORY / "tools" / _RESULTS
    for entry in json.loads(summary.read_text())["checks"]:
        for record in entry["benchmarks"]:
            if record["rehearsal"] or not record["complete"]:
                print(f"left out, a rehearsal or incomplete: {record['benchmark']}")
                continue
            path = folder / record["file"]
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(path)
    return 0


def main(given: Sequence[str] | None = None) -> int:
    """The command line, `--minimal` taken off."""
    parser = argparse.ArgumentParser(
        prog="check_gpu.py --minimal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP")
    new = REPOSITORY / "runs" / f"check_gpu_{datetime.now():%Y-%m-%d_%H%M%S}"
    parser.add_argument("--out", type=Path, default=new)
    parser.add_argument("--minutes", type=float, default=None, help="what has not begun by then is left out")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="download the wheels with pip")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny; no figure is a measurement")
    parser.add_argument("--unpack", type=Path, metavar="SUMMARY", help="its benchmarks' files into tools/results")
    parser.add_argument("--smoke", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.wheels is not None:
        return carried_wheels.collect(arguments.wheels)
    if arguments.unpack is not None:
        return unpack(arguments.unpack)
    if arguments.smoke is not None:
        return smoke(arguments.smoke, arguments.out)
    known = steps(arguments.out.absolute(), arguments.rehearse)
    if arguments.list:
        print("\n".join(listed(known)))
        return 0
    unknown = sorted(set(arguments.steps) - {step.name for step in known})
    if unknown:
        print(f"check_gpu: no step is called {' '.join(unknown)}: see --minimal --list", file=sys.stderr)
        return 2
    wanted = [step for step in known if not arguments.steps or step.name in arguments.steps]
    refused = refusal(wanted, arguments.rehearse)
    if refused:
        print(f"check_gpu: {refused}", file=sys.stderr)
        return 2
    return run(wanted, arguments.out.absolute(), arguments.rehearse, arguments.minutes)


def refusal(wanted: Sequence[Step], rehearsal: bool) -> str:
    """Say why this Python or machine cannot begin these steps; empty where it can."""
    lacking = carried_wheels.missing([step.name for step in wanted])
    if lacking:
        there = ", ".join(carried_wheels.THERE)
        return (
            f"this Python ({sys.executable}) lacks {', '.join(lacking)}; --minimal --wheels DIR collects wheels of all "
            f"but {there}"
        )
    if not rehearsal and not has_gpu():
        return "torch finds no GPU on this machine; --rehearse tries the steps on its CPU"
    return ""


def listed(known: Sequence[Step]) -> Iterator[str]:
    """The steps in their order, each with its limit, those so far added up, its commands and its wheels."""
    over_s = 0.0
    for step in known:
        over_s += step.limit_s
        yield f"{step.name:<8} at most {step.limit_s:4.0f} s, over after {over_s / 60:4.1f} min  {step.about}"
        yield f"         {', '.join(f'{check.name} {check.limit_s:.0f} s' for check in step.checks)}"
        yield f"         {carried_wheels.described((step.name,))}"
    yield f"all wheels: {carried_wheels.described(carried_wheels.ALL)}"
    yield from carried_wheels.compared()


if __name__ == "__main__":
    sys.exit(main())
