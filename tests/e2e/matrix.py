"""Stopped and resumed runs against uninterrupted ones: cells of a matrix, compared bit for bit.

A cell is three real processes: the whole run, one that is stopped by a signal, and one that resumes it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from quickstart import Command
from waiting import HANG_S

DLC = ("recipe.methods=[grpo,dlc]", "recipe.dlc={mu: 0.2, memory: {path: examples/quickstart/memory}}")
# Reference and optimizer are reset before the updates of steps 4 and 7, the responses lengthen after step 5.
LONG = (
    "recipe.methods=[grpo,kl]",
    "recipe.reset.every=3",
    "data.stages=[{until: 5, max_response_tokens: 14}]",
    "data.prompts_per_step=8",
    "policy.optimizer.decay=cosine",
)
# What a row of metrics tells of the clock and the machine.
_OTHERWISE = ("time", "update/", "mem/", "gpu/", "rollout/tokens_per_second")

_PICKLED = ("common.pt", ".metadata")


@dataclass(frozen=True)
class Cell:
    """A run of `steps` steps with a checkpoint after every `every`, stopped by `stop` after the first of them."""

    name: str
    stop: signal.Signals
    options: tuple[str, ...] = ()
    steps: int = 6
    every: int = 2


@dataclass(frozen=True)
class Found:
    """A cell's outcome: the step it was resumed after, what is equal, and the moments before the first update then."""

    cell: Cell
    after: int
    equal: Mapping[str, bool]
    nonzero: float

    @property
    def holds(self) -> bool:
        """Everything is equal, and the resumed process did have moments."""
        return all(self.equal.values()) and self.nonzero > 0.25


def run(command: Command, cell: Cell) -> Found:
    """Run a cell's three processes."""
    options = ["deterministic=true", f"steps={cell.steps}", f"checkpoint.every={cell.every}", "checkpoint.keep_last=9"]
    arguments = command.train(*options, "data.prompts_per_step=4", *cell.options)
    whole = _start(command, "whole", arguments)
    stopped = _start(command, "stopped", arguments)
    _stop(stopped, command.runs / "stopped", cell)
    _finish(whole, 0)
    manifests = (command.runs / "stopped" / "checkpoints").glob("step_*/manifest.json")
    after = max(int(path.parent.name.removeprefix("step_")) for path in manifests)
    _finish(_start(command, "stopped", [*arguments, "--resume"], "resumed"), 0)
    before, resumed = _lines(command, "whole"), _lines(command, "resumed")
    return Found(cell, after, _compared(command.runs, cell, after, before, resumed), _nonzero(resumed))


def _start(command: Command, name: str, arguments: Sequence[str], witness: str = "") -> subprocess.Popen[str]:
    path = command.runs / f"{witness or name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    return command.start(*arguments, f"name={name}", program=("tests/e2e/witnessed.py", str(path)))


def _stop(process: subprocess.Popen[str], folder: Path, cell: Cell) -> None:
    """SIGKILL as soon as the first checkpoint is there; SIGUSR1 when the step before it is done."""
    rows, manifest = folder / "metrics.jsonl", folder / "checkpoints" / f"step_{cell.every:06d}" / "manifest.json"
    kill = cell.stop is signal.SIGKILL
    deadline = time.monotonic() + HANG_S
    while not (manifest.exists() if kill else rows.exists() and rows.read_text().count("\n") >= cell.every - 1):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(cell.stop)
    _finish(process, -cell.stop if kill else 75)


def _finish(process: subprocess.Popen[str], code: int) -> None:
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, f"exit {process.returncode}, expected {code}\n{out}\n{err}"


def _lines(command: Command, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (command.runs / f"{name}.jsonl").read_text().splitlines()]


def _compared(
    runs: Path, cell: Cell, after: int, before: list[dict[str, Any]], resumed: list[dict[str, Any]]
) -> dict[str, bool]:
    learners = len({line["learner"] for line in before})
    rest = before[after * learners :]
    assert rest, "there is nothing left to compare"
    equal = {
        key: [line[key] for line in rest] == [line[key] for line in resumed]
        for key in ("moments", "before", "tokens", "drawn", "update", "weights")
    }
    folders = [runs / "whole", runs / "stopped"]
    samples, rows, ends = (
        [read(folder) for folder in folders]
        for read in (_samples, _rows, lambda folder: _checkpoint(folder, cell.steps))
    )
    assert [row["step"] for row in rows[0]] == list(range(1, cell.steps + 1))
    return equal | {
        "responses": samples[0].equals(samples[1]),
        "metrics": rows[0] == rows[1],
        "checkpoint": ends[0] == ends[1],
    }


def _samples(folder: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(path) for path in sorted((folder / "rollouts").glob("*.parquet"))])


def _rows(folder: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    told = [{key: value for key, value in row.items() if not key.startswith(_OTHERWISE)} for row in rows]
    # The seconds of a save have a row, which a kill right after the save leaves out.
    return [row for row in told if row.keys() != {"step"}]


def _checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """What the last checkpoint says of itself: the place in the data, decisions, and the hash of every file.

    Of files that Megatron pickles the content counts, because equal objects have several pickles; one is an index.
    """
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    # Its own digest is one of those pickles' hashes too.
    del manifest["sha256"]
    common = [path for path in manifest["files"] if Path(path).name == "common.pt"]
    contents = {path: torch.load(checkpoint / path, weights_only=False) for path in common}
    hashes = {path: entry["sha256"] for path, entry in manifest["files"].items() if Path(path).name not in _PICKLED}
    return {**manifest, "files": hashes, "contents": contents}


def _nonzero(resumed: list[dict[str, Any]]) -> float:
    """The smallest share of moments that are not zero, over learners and ranks, before their first updates."""
    first = {line["learner"]: line["moments"] for line in reversed(resumed)}
    return min(nonzero / max(elements, 1) for ranks in first.values() for _, elements, nonzero in ranks)


def table(found: Sequence[Found]) -> str:
    """Lines for people: a cell each, and a word for each thing that was compared."""
    heads = [*found[0].equal]
    lines = [["cell", "stopped by", "after", *heads, "moments not 0"]]
    for row in found:
        words = ["equal" if row.equal[head] else "DIFFERS" for head in heads]
        lines.append([row.cell.name, row.cell.stop.name, f"step {row.after}", *words, f"{row.nonzero:.0%}"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = ("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)
