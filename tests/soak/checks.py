"""Checks of a run that has come to its end: its history, its prompts, its copies, its memory and its files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq

from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.store import CheckpointStore, step_name
from tests.soak.runs import SEED, SoakRun

REPOSITORY = Path(__file__).resolve().parents[2]
# Times, memory, and counts that belong to one attempt and not to the history.
_OF_THE_CLOCK = ("time", "update/", "mem/", "gpu/", "rollout/tokens_per_second")
# Counts of judging processes that ended: they tell of the killed one, and what it had was judged again.
_OF_THE_JUDGE = ("reward/killed", "reward/died", "reward/retried")
MB_PER_100_STEPS = 1.0
RESPONSES = 8
_COPY_STEPS = 2


def history(root: Path) -> list[dict[str, float]]:
    """Return what the run recorded of each step, without what the clock decides."""
    without = (*_OF_THE_CLOCK, *_OF_THE_JUDGE)
    return [{name: value for name, value in row.items() if not name.startswith(without)} for row in training_rows(root)]


def groups(root: Path) -> list[tuple[int, str]]:
    """Return step and prompt of every group that was trained on, in order."""
    found: dict[tuple[int, int], str] = {}
    for row in _responses(root):
        found.setdefault((row["step"], row["group_id"]), row["prompt_id"])
    return [(step, prompt) for (step, _), prompt in found.items()]


def whole_groups(root: Path) -> list[str]:
    """Each group has each of its responses once."""
    indices: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row in _responses(root):
        indices[row["step"], row["group_id"]].append(row["index"])
    odd = [place for place, found in indices.items() if sorted(found) != list(range(RESPONSES))]
    return [f"{len(odd)} groups have not {RESPONSES} responses, each once: (step, group) {odd[:3]}"] if odd else []


def _responses(root: Path) -> list[dict[str, Any]]:
    columns = ["step", "group_id", "prompt_id", "index"]
    paths = sorted(root.glob("rollouts/*.parquet"))
    return [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]


def weights(root: Path) -> dict[str, str]:
    """Return the hashes of the newest checkpoint's files of weights and optimizer state."""
    manifest = newest_manifest(root)
    found = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}
    assert found, "no file of weights in the last checkpoint"
    return found


def newest_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of the newest complete checkpoint."""
    checkpoints = root / "checkpoints"
    path = checkpoints / step_name(complete_steps(checkpoints)[-1]) / "manifest.json"
    return cast("dict[str, Any]", json.loads(path.read_text()))


def training_rows(root: Path) -> list[dict[str, float]]:
    """Read the rows of training steps in metrics.jsonl; the last line may be being written."""
    path = root / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def told_at_the_end(log: str) -> str:
    """Return what a job's log says last: a line of megasharp where there is one, as Ray's may come after it."""
    lines = log.strip().splitlines()
    told = [line for line in lines if line.startswith("megasharp: ")] or lines
    return told[-1] if told else "no output"


def is_of_full_disk(end: str) -> bool:
    """Return whether a run told its user, at its end, that the disk is full."""
    return "no space left" in end.lower()


def steps_once(root: Path, steps: int) -> list[str]:
    """Each step has one row, in order."""
    done = [int(row["step"]) for row in training_rows(root)]
    return [] if done == list(range(1, steps + 1)) else [f"rows are of steps {_runs(done)}, not 1 to {steps}"]


def _runs(numbers: list[int]) -> str:
    odd = [b for a, b in pairwise(numbers) if b != a + 1]
    return f"{numbers[0]} to {numbers[-1]}, out of order at {odd[:5]}" if numbers else "none"


def prompts_once(root: Path) -> list[str]:
    """Prompts trained on and those waiting in the last checkpoint are the stream's first, each as often as there."""
    manifest = newest_manifest(root)
    epoch, position = manifest["cursor"]["epoch"], manifest["cursor"]["position"]
    names = [json.loads(line)["id"] for line in (REPOSITORY / "examples/quickstart/data/train.jsonl").open()]
    order = [list(names) for _ in range(epoch + 1)]
    for each, shuffled in enumerate(order):
        random.Random(f"prompts-{SEED}-{each}").shuffle(shuffled)
    waiting = Counter(order[entry["epoch"]][entry["position"]] for entry in manifest["pending"])
    had = Counter(prompt for _, prompt in groups(root)) + waiting
    due = Counter(order[epoch][:position]) + Counter(names * epoch)
    lost, twice = due - had, had - due
    found = whole_groups(root)
    if lost or twice:
        found.append(f"{len(lost)} prompts lost, {len(twice)} too often: {[*lost][:3]} {[*twice][:3]}")
    return found


def history_of(root: Path) -> dict[str, object]:
    """Return rows, groups and weights in the form in which JSON gives them back."""
    return {"rows": history(root), "groups": [list(pair) for pair in groups(root)], "weights": weights(root)}


def same_history(root: Path, undisturbed: dict[str, object]) -> list[str]:
    """Rows, groups and the last checkpoint are those of the undisturbed run, bit for bit."""
    own = history_of(root)
    found = [f"{part} differ from the undisturbed run's" for part in own if own[part] != undisturbed[part]]
    rows, calm_rows = (cast("list[dict[str, float]]", side["rows"]) for side in (own, undisturbed))
    pairs = zip(rows, calm_rows, strict=False)
    differing = Counter(name for row, calm in pairs for name in row if row[name] != calm.get(name))
    return [*found, f"in rows: {dict(differing.most_common(5))}"] if differing else found


def of_copy(copy: Path, run: SoakRun, log: Path, *, resume: bool) -> list[str]:
    """The copy of a run folder can be shown, has a whole checkpoint, and goes on for two steps where that is asked."""
    if not copy.exists():
        return []
    found = [] if _command(["runs", "show", str(copy)], log) == 0 else [f"runs show fails on the copy, see {log}"]
    newest = CheckpointStore(copy / "checkpoints", 1000, None).newest()
    if newest is None:
        return [*found, "no checkpoint in the copy"]
    if not resume:
        return found
    steps = newest[1].step + _COPY_STEPS
    options = [option for option in run.options if not option.startswith(("steps=", "cluster.", "log.wandb"))]
    local = ["cluster.backend=local", "cluster.nodes=1", f"steps={steps}", "--allow-change", "steps"]
    command = ["train", run.file, f"name={copy.name}", *options, *local, "--runs", str(copy.parent), "--resume"]
    if _command(command, log) != 0 or len(training_rows(copy)) != steps:
        found.append(f"the copy does not go on, see {log}")
    return found


def _command(arguments: list[str], log: Path) -> int:
    with log.open("ab") as file:
        command = [sys.executable, "-m", "megasharp.cli", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, stdout=file, stderr=file, check=False).returncode


def memory_growth(samples: list[tuple[int, float]]) -> float:
    """Return the slope of the driver's resident memory in MB for 100 steps, of (step, MB), in the run's second half.

    The median of the slopes of all pairs (Theil and Sen), so that one jump of the allocator does not decide it.
    """
    step, size = np.array([pair for pair in samples if pair[0] > samples[-1][0] / 2]).T
    apart = step[None, :] - step[:, None]
    slopes = (size[None, :] - size[:, None])[apart > 0] / apart[apart > 0]
    return float(100 * np.median(slopes))


def files_against_plan(run: SoakRun, root: Path) -> dict[str, tuple[float, float]]:
    """Return MB that `plan` says and that lie there, for each kind of file that grows."""
    command = [sys.executable, "-m", "megasharp.cli", "plan", run.file, *run.options, "--json"]
    told = json.loads(subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout)["disk"]
    places = {
        "checkpoints": ["checkpoints"],
        "rollouts": ["rollouts"],
        "rollout_tokens": ["rollout_tokens"],
        "metrics": ["metrics.jsonl"],
        "tensorboard": ["tensorboard"],
    }
    return {kind: (told[f"{kind}_bytes"] / 1e6, _size(root, names) / 1e6) for kind, names in places.items()}


def larger_than_planned(files: dict[str, tuple[float, float]]) -> list[str]:
    """Name the kinds of files that are more than the plan says, by half."""
    more = {kind: pair for kind, pair in files.items() if pair[1] > 1.5 * pair[0]}
    return [f"{kind}: plan says {told:.1f} MB, {there:.1f} MB are there" for kind, (told, there) in more.items()]


def _size(root: Path, names: list[str]) -> int:
    paths = [path for name in names for path in ((root / name).rglob("*") if (root / name).is_dir() else [root / name])]
    return sum(path.stat().st_size for path in paths if path.is_file())
