"""A run over engines that goes on from a checkpoint trains the groups that the whole run trained, in its order.

At the checkpoint both have equal weights, so the first step's log-probs agree to what a batch changes in an engine's
sums. Later steps begin from weights that differ by as much, and a token may fall otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from waiting import HANG_S

pytestmark = pytest.mark.long("fleet-runs")

REPOSITORY = Path(__file__).parents[2]
STEPS, AFTER = 4, 2
OPTIONS = (
    "eval={suites: [], with_memory: false}",
    "log.tensorboard=false",
    "data.prompts_per_step=4",
    f"steps={STEPS}",
    "cluster.backend=local",
    "rollout.engines=1",
    "policy.tp=1",
    "recipe.methods=[grpo]",
    "checkpoint={every: 1, keep_last: 9}",
)


def train(runs: Path, *arguments: str) -> str:
    """The example with these options, to its end; returns what it printed."""
    example = ["train", "examples/fleet_on_cpu/run.yaml", "--runs", str(runs)]
    done = subprocess.run(
        [sys.executable, "-m", "megasharp.cli", *example, *OPTIONS, *arguments], cwd=REPOSITORY, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def sampled(runs: Path) -> pd.DataFrame:
    """All responses of a run, in the order of its steps and groups."""
    tables = sorted((runs / "fleet_on_cpu" / "rollouts").glob("*.parquet"))
    return pd.concat([pd.read_parquet(table) for table in tables], ignore_index=True)


def cursor(runs: Path) -> dict[str, int]:
    manifest = runs / "fleet_on_cpu" / "checkpoints" / f"step_{STEPS:06d}" / "manifest.json"
    place: dict[str, int] = json.loads(manifest.read_text())["cursor"]
    return place


def test_a_resumed_run_trains_the_same_groups_in_the_same_order(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole)
    shutil.copytree(whole, resumed)
    for step in range(AFTER + 1, STEPS + 1):
        shutil.rmtree(resumed / "fleet_on_cpu" / "checkpoints" / f"step_{step:06d}")
        (resumed / "fleet_on_cpu" / "rollouts" / f"step_{step:06d}.parquet").unlink()
    assert f"after step {AFTER}" in train(resumed, "--resume")
    first, second = sampled(whole), sampled(resumed)
    names = ["step", "group_id", "index", "prompt_id", "policy_version"]
    assert first[names].equals(second[names])
    assert first.drop_duplicates("group_id")["prompt_id"].is_unique
    assert cursor(whole) == cursor(resumed)
    one, other = (table[table["step"] == AFTER + 1] for table in (first, second))
    assert list(one["text"]) == list(other["text"])
    for column in ("mean_sampler_logp", "mean_policy_logp"):
        difference = (one[column] - other[column]).abs().max()
        print(f"{column}: the largest difference of the first step after the resume is {difference:.1e}")
        assert difference <= 1e-5, column
