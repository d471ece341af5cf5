"""Runs of a mixture of experts with its experts on two ranks: replayed routing, and a resume bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from matrix import Cell, run, table
from quickstart import QUICKSTART, REPOSITORY, SMALL, Command
from upcycled import upcycle

from megasharp.config.run_config import load_run
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.run import train

DENSE = REPOSITORY / "examples" / "quickstart" / "base"


def rows(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train for two steps; returns what metrics.jsonl says of them."""
    options = ("steps=2", "policy.optimizer={lr: 1.0e-4, warmup_steps: 0}")
    resolved = check(load_run(REPOSITORY / QUICKSTART, [*SMALL, *options, *overrides]), QUICKSTART)
    train(resolved, folder, resume=False, say=lambda line: None)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "policy/loss" in line]


@pytest.mark.long("layouts")
def test_experts_on_two_ranks_train_as_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routing is replayed from what the engine recorded: nothing is moved, where both compute in float32."""
    monkeypatch.chdir(REPOSITORY)
    model = f"model.path={upcycle(DENSE, tmp_path / 'mixture')}"
    replay = "policy.experts.replay=true"
    one = rows(tmp_path / "one", model, "policy.dp=1", replay)
    two = rows(tmp_path / "two", model, "policy.dp=2", "policy.ep=2", replay)
    unreplayed = rows(tmp_path / "unreplayed", model, "policy.dp=2", "policy.ep=2")
    assert all(row["policy/grad_norm"] > 0 for row in one)
    for others in (two, unreplayed):
        assert [row["rollout/tokens"] for row in others] == [row["rollout/tokens"] for row in one]
        for row, want in zip(others, one, strict=True):
            assert row["policy/grad_norm"] == pytest.approx(want["policy/grad_norm"], rel=1e-3)
            assert row["experts/load_max"] == pytest.approx(
                want["experts/load_max"], rel=0.1
            )  # Prompts count as they are computed.
            assert row["policy/engine_gap_max"] < 1e-4
    # A tie of two experts may fall either way by rounding.
    assert max(row["experts/moved"] for row in (*one, *two)) < 1e-3
    assert not any("experts/moved" in row for row in unreplayed)


@pytest.mark.long("saves")
def test_a_killed_run_goes_on_bit_for_bit(command: Command, tmp_path: Path) -> None:
    model = f"model.path={upcycle(DENSE, tmp_path / 'mixture')}"
    layout = ("policy.dp=2", "policy.ep=2", "policy.experts.replay=true")
    found = run(command, Cell("experts on two ranks", signal.SIGKILL, (model, *layout)))
    print(table([found]))
    assert found.holds, table([found])
