"""Seconds per GRPO step on one CPU machine: megasharp beside TRL's GRPOTrainer.

    make bench        (or: python tools/bench_cpu.py --rounds 3 --steps 12)
    python tools/bench_cpu.py --size 5m

The same model, prompts, verifier, batch, sampling, loss and number of steps (`cpu_trainers.py`); the trainers in turn,
round by round, each in processes of its own, so that a noisy machine is noisy for all. A step is everything between the
beginnings of two steps: sampling, verification, forward, backward, update, metrics, and (ours) handing the weights to
the engine. The first steps are warm-up and do not count. Wall time decides; CPU seconds of all of a trainer's processes
stand beside it.

TRL runs as one process with a thread a core, and as one data-parallel process a core with one thread each; every round
takes the faster. megasharp runs as it chooses itself. A round in which other processes used more than a fifth of a core
does not count and is repeated, a few times; without all rounds there is no verdict, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cpu_trainers import QUICKSTART, Figures, Setting
from results import Figure, report

# Cores that other processes may use, on average over a trainer's steps.
OTHERS = 0.2
# Each trainer draws its own responses, so their lengths differ a little.
SAME_TOKENS = 0.1
TRAINERS = Path(__file__).with_name("cpu_trainers.py")


@dataclass(frozen=True, slots=True)
class Size:
    """A model of the quickstart's kind: the largest ratio wanted, and what its config.json has otherwise.

    Without `sizes` it is the quickstart's own; one with them has random weights.
    """

    goal: float
    sizes: dict[str, object] | None = None


SIZES = {
    "quickstart": Size(0.60),
    "5m": Size(
        0.65,
        {
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round: ours, and TRL's in both ways."""

    ours: Figures
    threads: Figures
    processes: Figures

    @property
    def theirs(self) -> Figures:
        """TRL's faster way."""
        return min(self.threads, self.processes, key=lambda figures: figures.wall)

    @property
    def others(self) -> float:
        """The largest use of the machine by other processes."""
        return max(figures.others for figures in (self.ours, self.threads, self.processes))

    @property
    def unlike(self) -> float:
        """The difference of the trainers' response tokens, as a share."""
        return abs(self.ours.tokens / self.theirs.tokens - 1.0)

    def row(self) -> str:
        """Return the table's row."""
        ours, theirs = self.ours, self.theirs
        return (
            f"{ours.wall:>9.3f} {ours.cpu:>7.2f}  {self.threads.wall:>9.3f} {self.threads.cpu:>7.2f}  "
            f"{self.processes.wall:>9.3f} {self.processes.cpu:>7.2f}  {ours.wall / theirs.wall:>5.2f} "
            f"{ours.cpu / theirs.cpu:>5.2f}  {ours.tokens:>6,.0f} {theirs.tokens:>6,.0f}  {self.others:>6.2f}"
        )


HEADER = (
    f"{'megasharp':>17}  {'TRL, threads':>17}  {'TRL, processes':>17}  {'ratio':>11}  {'tokens':>13}  {'other':>6}\n"
    f"{'wall':>9} {'CPU':>7}  {'wall':>9} {'CPU':>7}  {'wall':>9} {'CPU':>7}  {'wall':>5} {'CPU':>5}  "
    f"{'ours':>6} {'TRL':>6}  {'cores':>6}"
)


def measure(trainer: str, setting: Setting, processes: int = 1, threads: int | None = None) -> Figures:
    """Run a trainer in a fresh process; `threads` None leaves their number to it."""
    command = [sys.executable, str(TRAINERS), trainer, json.dumps(asdict(setting)), "--processes", str(processes)]
    # A machine's GPUs are for neither.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{trainer} failed:\n{done.stderr[-3000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def one_round(setting: Setting) -> Round:
    """Run all three, one after the other."""
    cores = len(os.sched_getaffinity(0))
    return Round(
        ours=measure("megasharp", setting),
        threads=measure("trl", setting, threads=cores),
        processes=measure("trl", setting, processes=cores, threads=1),
    )


def bench(setting: Setting, wanted: int, most: int) -> list[Round]:
    """Return `wanted` rounds that count, or fewer where `most` tries do not give them."""
    counted: list[Round] = []
    print(HEADER, flush=True)
    for _ in range(most):
        made = one_round(setting)
        busy, unlike = made.others > OTHERS, made.unlike > SAME_TOKENS
        why = "  does not count: the machine was busy" if busy else "  does not count: other tokens" if unlike else ""
        print(made.row() + why, flush=True)
        if not why:
            counted.append(made)
        if len(counted) == wanted:
            break
    return counted


def model_folder(size: Size, folder: Path) -> str:
    """Return the model to train: the quickstart's, or a random one written into `folder`."""
    if size.sizes is None:
        return str(QUICKSTART / "base")
    from megasharp.convert.random_model import write_random_model

    write_random_model(QUICKSTART / "base", folder / "model", size.sizes, torch.float32, seed=1)
    return str(folder / "model")


def figures(rounds: Sequence[Round], goal: float) -> list[Figure]:
    """Return the medians of rounds, the ratio first."""

    def median(
        name: str, value: Callable[[Round], float], unit: str, bar: float | None = None, note: str = ""
    ) -> Figure:
        return Figure(name, statistics.median(map(value, rounds)), unit, bar, repeats=len(rounds), note=note)

    return [
        median("wall, megasharp over TRL", lambda made: made.ours.wall / made.theirs.wall, "", goal),
        median("CPU, megasharp over TRL", lambda made: made.ours.cpu / made.theirs.cpu, ""),
        median("step of megasharp", lambda made: made.ours.wall, "s"),
        median("step of TRL", lambda made: made.theirs.wall, "s", note="its faster way of each round"),
        median("step of TRL, threads", lambda made: made.threads.wall, "s", note="one process, a thread a core"),
        median("step of TRL, processes", lambda made: made.processes.wall, "s", note="a process a core"),
        median("response tokens, megasharp over TRL", lambda made: made.ours.tokens / made.theirs.tokens, ""),
        median("other processes", lambda made: made.others, "cores", OTHERS),
    ]


def main() -> None:
    """Parse, measure in turn, print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="quickstart", help="the model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that must count")
    parser.add_argument("--steps", type=int, default=12, help="steps a run")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(model_folder(size, Path(folder)), arguments.steps, random=size.sizes is not None)
        rounds = bench(setting, arguments.rounds, most=3 * arguments.rounds)
    if len(rounds) < arguments.rounds:
        print(f"no verdict: {len(rounds)} of {arguments.rounds} rounds count")
        sys.exit(2)
    settings = {"size": arguments.size, "rounds": arguments.rounds, "steps": arguments.steps}
    report(
        "bench_cpu", figures(rounds, size.goal), settings, ("trl", "transformers", "accelerate"), subject=arguments.size
    )


if __name__ == "__main__":
    main()
