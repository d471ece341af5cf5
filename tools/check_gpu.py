"""All that waits for a GPU, in one command: tests, the quickstart beside a CPU's, and every benchmark.

    python tools/check_gpu.py                       # the limits add up to 66 minutes (73 with Transformer Engine)
    python tools/check_gpu.py --only step sync      # some of it
    python tools/check_gpu.py --list
    python tools/check_gpu.py --minimal             # half an hour on a machine that lacks much: `minimal_gpu.py`

Each check is a process of its own with a limit, so that one that fails, hangs or runs out of memory leaves the others
alone; what it has started ends with it, and with this command. Their output is in `--out`, a new folder for each call
where none is given; benchmarks' JSON files are in tools/results. The last lines are a table. Exit code 1 where a check
failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from limited import REPOSITORY, Check, end_by_exception, ended, tool

_OUTPUT_LINES = 12
# A benchmark's row with a bar, and one whose figure does not meet it (`results.py`).
_BAR, _MISSED = re.compile(r"  [<>]= \S+"), re.compile(r"  NO(  |$)")
# The quickstarts that `curves` compares, and the run of each.
_QUICKSTARTS = {"quickstart-gpu": "cuda", "quickstart-cpu": "cpu"}
_FIFTHS = 5
_FEWEST_STEPS = 50
_CURVES = (
    "reward/mean",
    "policy/loss",
    "entropy/policy",
    "policy/grad_norm",
    "rollout/length_mean",
    "time/step",
)
# The runs draw other responses. Three seeds on a CPU were 0.014 apart at most, and 0.10 lie between the first and the
# last fifth of `_REWARDS_STEPS` steps.
_REWARDS_APART = 0.03
_REWARDS_STEPS = 200
# Bytes. Qwen3-4B with its optimizer has 72 GB, and 46 GB of activations where attention alone is computed again, by
# `megasharp/planner/formulas.py`; on smaller GPUs all is, and no logits are held.
_ROOM_FOR_ACTIVATIONS = 140e9


def quickstart(runs: Path, device: str, steps: int) -> tuple[str, ...]:
    """The quickstart's training alone, without evaluations."""
    return (
        "-m", "megasharp.cli", "train", "examples/quickstart/run.yaml", "--runs", str(runs),
        f"name=quickstart_{device}", f"policy.device={device}", f"steps={steps}", "eval.every=0", "eval.at_start=false",
        "eval.suites=[]", "log.tensorboard=false",
    )  # fmt: skip


def checks(out: Path, steps: int) -> list[Check]:
    """Everything, the quickest and most basic first."""
    from megasharp.learner.layer_spec import transformer_engine_is_there

    return [
        Check("tests", ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu"), 600),
        *(Check(name, quickstart(out, device, steps), 600) for name, device in _QUICKSTARTS.items()),
        Check("curves", tool("check_gpu", "--compare", str(out)), 60),
        Check("head", tool("bench_head"), 300),
        Check("batching", tool("bench_batching"), 300),
        step("step", "--annotate"),
        Check("step-8b", tool("bench_step", "--model", "qwen3-8b", "--random-init", *held_on_host()), 500),
        *([step("step-fp8", "--fp8", "hybrid")] if transformer_engine_is_there() else []),
        Check("sync", tool("bench_sync", "--model", "qwen3-8b"), 600),
    ]


def step(name: str, *arguments: str) -> Check:
    """A step of 4B, by which the bar is."""
    return Check(name, tool("bench_step", "--model", "qwen3-4b", "--random-init", *arguments, *less_memory()), 400)


def held_on_host() -> tuple[str, ...]:
    """What a step of 8B needs on one GPU: its optimizer's state in the host's memory, 98 GB of it."""
    return "--optimizer-offload", "--recompute", "full", "--head", "chunked"


def less_memory() -> tuple[str, ...]:
    """What a step of 4B needs on this GPU; on a machine without one, what it needs on an H200."""
    import torch

    room = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else _ROOM_FOR_ACTIVATIONS
    if room >= _ROOM_FOR_ACTIVATIONS:
        return "--recompute", "selective"
    return "--recompute", "full", "--head", "chunked"


def run(check: Check, out: Path) -> tuple[str, float]:
    """How it ended, and its seconds; prints the end of its output."""
    log = out / f"{check.name}.log"
    how, seconds = ended(check, log)
    print(f"--- {check.name}: {how}; {log}", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    with_bars = [line for line in lines[:-_OUTPUT_LINES] if _BAR.search(line)]
    print("\n".join(with_bars + lines[-_OUTPUT_LINES:]), flush=True)
    missed = sum(_BAR.search(line) is not None and _MISSED.search(line) is not None for line in lines)
    return how + (f", {missed} bar(s) missed" if missed else ""), seconds


def compare(out: Path) -> int:
    """The two quickstarts' curves: means over fifths of the run. 1 where a run is missing or the rewards are apart."""
    curves = {}
    for name, device in _QUICKSTARTS.items():
        file = out / f"quickstart_{device}" / "metrics.jsonl"
        if not file.is_file():
            print(f"curves compares what {' and '.join(_QUICKSTARTS)} left in --out; {name} left nothing in {out}")
            return 1
        lines = file.read_text().splitlines()
        curves[device] = [row for row in map(json.loads, lines) if "policy/loss" in row]
    gpu, cpu = map(len, curves.values())
    if gpu != cpu or gpu < _FEWEST_STEPS:
        print(f"curves are of runs of the same length, {_FEWEST_STEPS} steps or more; these have {gpu} and {cpu}")
        return 1
    print(f"{gpu} steps; GPU / CPU")
    for name in _CURVES:
        values = [[row[name] for row in curve] for curve in curves.values()]
        if not all(value is not None and math.isfinite(value) for each in values for value in each):
            print(f"{name} is not a finite number in every step")
            return 1
        means = [fifths(each) for each in values]
        print(f"{name:<22}" + "   ".join(f"{one:.4g} / {other:.4g}" for one, other in zip(*means, strict=True)))
    rewards = [fifths([row["reward/mean"] for row in curve]) for curve in curves.values()]
    apart = max(abs(one - other) for one, other in zip(*rewards, strict=True))
    # Means over fewer steps lie further apart by chance.
    allowed = _REWARDS_APART * max(1.0, _REWARDS_STEPS / gpu) ** 0.5
    print(f"rewards of a fifth are at most {apart:.3g} apart, {allowed:.3g} are allowed")
    return int(apart > allowed)


def fifths(values: Sequence[float]) -> list[float]:
    """Means over five parts of what is at least five long."""
    bounds = [part * len(values) // _FIFTHS for part in range(_FIFTHS + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in pairwise(bounds)]


def main() -> int:
    """Run what was asked for; the table comes last."""
    if "--minimal" in sys.argv:
        from minimal_gpu import main as minimal

        return minimal([argument for argument in sys.argv[1:] if argument != "--minimal"])
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A run folder is never written over.
    new = REPOSITORY / "runs" / f"check_gpu_{datetime.now():%Y-%m-%d_%H%M%S}"
    parser.add_argument("--out", type=Path, default=new)
    parser.add_argument("--steps", type=int, default=200, help=f"of the quickstarts, {_FEWEST_STEPS} or more")
    parser.add_argument("--only", nargs="+", default=None, help="names of checks")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minimal", action="store_true", help="steps for a lent machine: see --minimal --help")
    parser.add_argument("--compare", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare is not None:
        return compare(arguments.compare)
    known = checks(arguments.out, arguments.steps)
    if arguments.list:
        print("\n".join(f"{check.name:<16} {' '.join(check.command)}" for check in known))
        return 0
    unknown = set(arguments.only or ()) - {check.name for check in known}
    if unknown or not torch.cuda.is_available():
        told = f"--only {' '.join(sorted(unknown))}: see --list" if unknown else "torch finds no GPU on this machine"
        print(f"check_gpu: {told}", file=sys.stderr)
        return 2
    return told_of([check for check in known if arguments.only is None or check.name in arguments.only], arguments.out)


def told_of(wanted: Sequence[Check], out: Path) -> int:
    """Run them one after another and print how each ended."""
    import torch

    end_by_exception()
    out.mkdir(parents=True, exist_ok=True)
    ends = {check.name: run(check, out) for check in wanted}
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, (how, seconds) in ends.items():
        print(f"{name:<16} {seconds:7.1f} s  {how}")
    return int(any(not how.startswith("ok") for how, _ in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
