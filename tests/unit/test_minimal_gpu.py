"""The steps of a lent GPU: what fits into their limits and a machine's packages, and what is kept of one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import carried_wheels  # noqa: E402
import minimal_gpu  # noqa: E402
from limited import Check  # noqa: E402

from megasharp.ops import attention_kernels  # noqa: E402

KEEPS = """
import sys
sys.path.insert(0, "tools")
from results import Figure, keep, machine
keep("bench_some", [Figure("step", 1.5, "s")], {}, machine())
print("tests/gpu/test_some.py::test_one[a b] PASSED")
print("tests/gpu/test_some.py::test_two FAILED")
raise SystemExit("the rest failed")
"""
LATE = Check("late", ("-c", "print('late')"), 60.0)


def test_no_step_takes_more_than_ten_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where all kinds of attention are installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention_kernels, "software_here", lambda: SimpleNamespace(lacks={}, fa4_windows=True))
    made = minimal_gpu.steps(tmp_path, False)
    assert {check.name for check in made[2].checks} >= {"qwen3-1.7b-fa2", "qwen3-1.7b-fa3", "qwen3-4b-fa3"}
    assert all(step.limit_s <= 600 for step in made)
    assert tuple(step.name for step in made) == carried_wheels.ALL


def test_half_an_hour_has_the_steps_before_8b_where_torchs_attention_is_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(minimal_gpu, "kernels_here", lambda: ["fa2"])
    made = minimal_gpu.steps(tmp_path, False)
    assert sum(step.limit_s for step in made[: carried_wheels.ALL.index("step-8b")]) <= 1800


def test_what_is_missing_is_said_with_the_standard_library_alone(tmp_path: Path) -> None:
    """`-E -s -S` leave this Python its standard library; without an argument it is refused before its first step."""
    command = [sys.executable, "-E", "-s", "-S", str(TOOLS / "check_gpu.py"), "--minimal"]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    lacking = next(line for line in listed.splitlines() if line.startswith("not in this Python: "))
    assert set(lacking.partition(": ")[2].split(", ")) == {
        *carried_wheels.THERE,
        *(wheel.name for wheel in carried_wheels.WHEELS if not wheel.optional),
    }
    refused = subprocess.run([*command, "step"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert refused.returncode == 2 and "lacks torch, triton, transformers, megatron-core" in refused.stderr
    assert "pytest" not in refused.stderr and "Traceback" not in refused.stderr


def test_the_wheels_are_those_that_tests_ran_with() -> None:
    lines = (TOOLS.parent / "constraints.txt").read_text().splitlines()
    tested = {line.partition(";")[0].strip() for line in lines if "< '3.12'" not in line}
    here = {f"{wheel.name}=={wheel.version}" for wheel in carried_wheels.WHEELS if not wheel.optional}
    assert here <= tested


def entries(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "summary.json").read_text())["checks"]
    return found


def test_a_step_run_later_adds_to_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With no figure of an earlier one, and no success where nothing was tried."""
    minimal_gpu.run([minimal_gpu.Step("first", "", (Check("some", ("-c", KEEPS), 60.0),))], tmp_path, False, None)
    absent = Check("run-engines", ("-c", "print('engines: note: not tried: no Python'); raise SystemExit(77)"), 60.0)
    assert minimal_gpu.run([minimal_gpu.Step("engines", "", (absent,))], tmp_path, False, None) == 0
    some, engines = entries(tmp_path)
    assert len(some["benchmarks"]) == 1 and engines["benchmarks"] == []
    assert engines["ended"] == "not tried" and engines["why"] == "engines: note: not tried: no Python"
    table = capsys.readouterr().out
    assert "s  not tried: engines: note: not tried: no Python\n" in table and table.count("step 1.5 s") == 2


def test_what_fails_leaves_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Check("some", ("-c", KEEPS), 60.0)
    steps = [minimal_gpu.Step("first", "", (failing, LATE))]
    assert minimal_gpu.run(steps, tmp_path, False, None) == 1
    some, late = entries(tmp_path)
    assert some["ended"] == "exit 1" and late["ended"] == "ok" and late["benchmarks"] == []
    assert some["tests"] == {"passed": 1, "skipped": 0, "failed": ["tests/gpu/test_some.py::test_two"]}
    (record,) = some["benchmarks"]
    assert (record["figures"][0]["value"], record["complete"]) == (1.5, False)
    assert "step 1.5 s (so far)" in capsys.readouterr().out
    assert (tmp_path / "log.txt").read_text().endswith("the rest failed\nlate\n")


def test_what_does_not_fit_is_left_out_and_a_rehearsal_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [minimal_gpu.Step("first", "", (LATE,))]
    assert minimal_gpu.run(steps, tmp_path, True, 0.1) == 0
    (late,) = entries(tmp_path)
    assert late["ended"] == "left out: no time" and late["rehearsal"] is True
    assert "REHEARSAL: no figure below is a measurement" in capsys.readouterr().out
