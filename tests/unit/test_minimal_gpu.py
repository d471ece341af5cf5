"""The steps of a lent GPU: what fits into their limits and a machine's packages, and what is kept of one that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import carried_wheels  # noqa: E402
import minimal_gpu  # noqa: E402
from limited import Check  # noqa: E402

KEEPS = """
import sys
sys.path.insert(0, "tools")
from results import Figure, keep, machine
keep("bench_some", [Figure("step", 1.5, "s")], {}, machine())
print("tests/gpu/test_some.py::test_one[a b] PASSED")
print("tests/gpu/test_some.py::test_two FAILED")
raise SystemExit("the rest failed")
"""


def test_no_step_takes_more_than_ten_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where all kinds of attention are installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(minimal_gpu, "software_here", lambda: SimpleNamespace(lacks={}, fa4_windows=True))
    made = minimal_gpu.steps(tmp_path, False)
    assert {check.name for check in made[3].checks} >= {"qwen3-1.7b-fa2", "qwen3-1.7b-fa3", "qwen3-4b-fa3"}
    assert all(step.limit_s <= 600 for step in made)
    assert {step.name for step in made} == set(carried_wheels.ALL)


def test_the_wheels_are_those_that_tests_ran_with() -> None:
    lines = (TOOLS.parent / "constraints.txt").read_text().splitlines()
    tested = {line.partition(";")[0].strip() for line in lines if "< '3.12'" not in line}
    here = {f"{wheel.name}=={wheel.version}" for wheel in carried_wheels.WHEELS if not wheel.optional}
    assert here <= tested


def test_what_fails_leaves_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing, late = Check("some", ("-c", KEEPS), 60.0), Check("late", ("-c", "print('late')"), 60.0)
    steps = [minimal_gpu.Step("first", "", (failing, late))]
    assert minimal_gpu.run(steps, tmp_path, False, None) == 1
    checks = json.loads((tmp_path / "summary.json").read_text())["checks"]
    assert checks["some"]["ended"] == "exit 1" and checks["late"]["ended"] == "ok"
    assert checks["some"]["tests"] == {"passed": 1, "skipped": 0, "failed": ["tests/gpu/test_some.py::test_two"]}
    (record,) = checks["some"]["benchmarks"]
    assert (record["figures"][0]["value"], record["complete"]) == (1.5, False)
    assert "step 1.5 s (so far)" in capsys.readouterr().out
    assert (tmp_path / "log.txt").read_text().endswith("the rest failed\nlate\n")


def test_what_does_not_fit_is_left_out_and_a_rehearsal_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [minimal_gpu.Step("first", "", (Check("late", ("-c", "print('late')"), 60.0),))]
    assert minimal_gpu.run(steps, tmp_path, True, 0.1) == 0
    tree = json.loads((tmp_path / "summary.json").read_text())
    assert tree["checks"]["late"]["ended"] == "left out: no time" and tree["rehearsal"] is True
    assert "REHEARSAL: no figure below is a measurement" in capsys.readouterr().out
