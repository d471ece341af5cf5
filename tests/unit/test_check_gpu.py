"""The one command that waits for a GPU: it may be given twice, and says what a part of it lacks."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from cases import each_case
from waiting import HANG_S, SOON_S, wait_until

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import check_gpu  # noqa: E402
import limited  # noqa: E402
from results import Figure, Machine, table  # noqa: E402


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


def test_bars_are_shown_and_missed_ones_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However long the output is after them."""
    figures = [Figure("slow", 3.0, "ms", 2.0), Figure("fast", 1.0, "ms", 2.0), Figure("told", 9.0, "ms")]
    text = table(figures, Machine("2026-11-23", "a GPU", {}, "unknown")) + "\n" + "more\n" * 20
    ended, _ = check_gpu.run(check_gpu.Check("bars", ("-c", f"print({text!r})"), HANG_S), tmp_path)
    shown = capsys.readouterr().out
    assert ended == "ok, 1 bar(s) missed" and "slow" in shown and "fast" in shown and "told" not in shown


def curve(folder: Path, rewards: list[float]) -> None:
    rows = [dict.fromkeys(check_gpu._CURVES, 1.0) | {"reward/mean": reward} for reward in rewards]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@each_case(
    ("steps", "end", "status", "told"),
    [
        (200, 0.24, 0, "apart, 0.03 are allowed"),
        (200, 0.14, 1, "at most 0.0987 apart, 0.03 are allowed"),
        (50, 0.19, 0, "at most 0.0534 apart, 0.06 are allowed"),
        (200, math.nan, 1, "reward/mean is not a finite number in every step"),
        (49, 0.25, 1, "50 steps or more; these have 49 and 49"),
    ],
)
def test_curves_that_are_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, end: float, status: int, told: str
) -> None:
    """Rewards that rise from 0.14 to 0.25 on the CPU, and to `end` on the GPU; not at all is a failure."""
    for device, last in (("cpu", 0.25), ("cuda", end)):
        curve(tmp_path / f"quickstart_{device}", [0.14 + (last - 0.14) * step / steps for step in range(steps)])
    assert check_gpu.compare(tmp_path) == status
    assert told in capsys.readouterr().out


def test_a_run_that_died_on_the_gpu_is_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve(tmp_path / "quickstart_cpu", [0.2] * 200)
    curve(tmp_path / "quickstart_cuda", [0.2] * 60)
    assert check_gpu.compare(tmp_path) == 1
    assert "these have 60 and 200" in capsys.readouterr().out


@pytest.mark.long("examples")
@each_case("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_check_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """As where a lent machine's time is over: what still runs would keep the GPU."""
    call = "check_gpu.told_of([check_gpu.Check('slow', ('-c', 'import time; time.sleep(3600)'), 600.0)], Path('logs'))"
    lines = f"import sys\nsys.path.insert(0, {str(TOOLS)!r})\nimport check_gpu\nfrom pathlib import Path\n{call}"
    with subprocess.Popen([sys.executable, "-c", lines], cwd=tmp_path) as command:
        try:
            started = check_of(command.pid)
            command.send_signal(number)
            assert psutil.wait_procs([started], timeout=SOON_S)[1] == []
            ended = command.wait(HANG_S)
        finally:
            command.kill()
    assert ended == (-number if number == signal.SIGKILL else 128 + number)


def check_of(command: int) -> psutil.Process:
    """The check that a command has started, once it is one."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(command).children():
                if "import time; time.sleep(3600)" in child.cmdline():
                    return child
        time.sleep(0.1)
    psutil.Process(command).kill()
    raise AssertionError("no check was started")


def test_a_check_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, log = subprocess.Popen.wait, tmp_path / "slow.log"

    def wait_once_started(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        wait_until(lambda: log.read_text().endswith("\n"))
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_started)
    child = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True)"
    monkeypatch.setattr(limited, "REPOSITORY", tmp_path)
    ended, _ = check_gpu.run(check_gpu.Check("slow", ("-c", f"{child}; time.sleep(3600)"), 0.5), tmp_path)
    assert ended == "not done in 0.5 s"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(log.read_text())).wait(SOON_S)


@each_case(("room", "head"), [(85e9, True), (149e9, False)], ids=["H100", "H200"])
def test_a_step_is_asked_for_that_fits(monkeypatch: pytest.MonkeyPatch, room: float, head: bool) -> None:
    """18 bytes a parameter are 72 GB: an H100 has no room for logits or activations of 8,192 tokens beside them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=room))
    (step,) = (check for check in check_gpu.checks(Path(), 1) if check.name == "step")
    assert ("chunked" in step.command) == head
    assert ("full" in step.command) == head
