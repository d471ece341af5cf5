"""The collector on a simulated clock, short: `tools/simulate_rollouts.py` with few prompts and steps."""

from __future__ import annotations

import importlib
import sys

import pytest
from cases import each_case

SMALL = "--steps 20 --prompts 4 --responses 4 --engines 2 --running 6 --limit 2000"


def simulated(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    tool = importlib.import_module("simulate_rollouts")
    monkeypatch.setattr(sys, "argv", ["simulate_rollouts", *words.split()])
    return tool.main()  # type: ignore[no-any-return]


def test_every_setting_trains_each_admitted_response_once_and_on_policy_oversampling_shortens_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few responses run at once, so that some wait in the engines' queue."""
    assert simulated(monkeypatch, SMALL) == 0
    said = capsys.readouterr().out
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 20 and sum("passed" in cells[-1] for cells in rows) == 16
    for cells in rows:
        shorter = float(cells[7].split()[0])
        assert shorter < -1 if "biased" in cells[-1] else shorter == 0


@each_case("setting", ["0.5/1/abort", "1/2/keep"])
def test_a_collector_that_drops_long_groups_fails(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    assert simulated(monkeypatch, f"{SMALL} --steps 30 --broken --settings {setting}") == 1
