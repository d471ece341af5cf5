"""The one command that waits for a GPU: it may be given twice, and says what a part of it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import check_gpu  # noqa: E402


def outs(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Path:
    """The folder that a call on a machine with a GPU would write to."""
    found: list[Path] = []

    def told_of(wanted: list[check_gpu.Check], out: Path) -> int:
        found.append(out)
        return 0

    monkeypatch.setattr(check_gpu, "told_of", told_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85e9))
    monkeypatch.setattr(sys, "argv", ["check_gpu", *arguments])
    assert check_gpu.main() == 0
    return found[0]


def test_a_second_call_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs are never written over: the quickstarts of a second call in the same folder would be refused."""
    moments = iter(["2026-11-23_060000", "2026-11-23_060001"])
    monkeypatch.setattr(check_gpu, "datetime", SimpleNamespace(now=lambda: _Moment(next(moments))))
    assert outs(monkeypatch) != outs(monkeypatch)
    monkeypatch.setattr(check_gpu, "datetime", SimpleNamespace(now=lambda: _Moment("later")))
    assert outs(monkeypatch, "--out", str(tmp_path)) == tmp_path


class _Moment:
    def __init__(self, text: str) -> None:
        self._text = text

    def __format__(self, form: str) -> str:
        return self._text


def test_curves_of_runs_that_are_not_there(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "check_gpu.py"), "--compare", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout == (
        "curves compares what quickstart-gpu and quickstart-cpu left in --out; "
        f"quickstart-gpu left nothing in {tmp_path}\n"
    )


@pytest.mark.parametrize(("room", "head"), [(85e9, True), (149e9, False)], ids=["H100", "H200"])
def test_a_step_is_asked_for_that_fits(monkeypatch: pytest.MonkeyPatch, room: float, head: bool) -> None:
    """18 bytes a parameter are 72 GB: an H100 has no room for logits or activations of 8,192 tokens beside them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=room))
    (step,) = (check for check in check_gpu.checks(Path(), 1) if check.name == "step")
    assert ("chunked" in step.command) == head
    assert ("full" in step.command) == head
