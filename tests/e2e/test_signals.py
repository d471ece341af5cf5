"""SIGTERM and Ctrl-C end a real run with their exit codes, one line, and nothing left; it can go on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from quickstart import Command
from waiting import HANG_S, SOON_S, wait_until

Send = Callable[[subprocess.Popen[str], int], None]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder for temporary files, with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="stop", dir="/tmp") as folder:
        yield Path(folder)


def stopped(process: subprocess.Popen[str], send: Callable[[], object]) -> tuple[int, str]:
    """Exit code and standard error after a signal; nothing that the run had started is left."""
    family = psutil.Process(process.pid).children(recursive=True)
    send()
    _, error = process.communicate(timeout=HANG_S)
    assert psutil.wait_procs(family, timeout=SOON_S)[1] == []
    return process.returncode, error


def to_the_group(process: subprocess.Popen[str], number: int) -> None:
    """As `timeout` and a terminal send it."""
    os.killpg(process.pid, number)


def to_all(process: subprocess.Popen[str], number: int) -> None:
    """As Slurm sends it: to Ray's servers and the actors too."""
    family = psutil.Process(process.pid).children(recursive=True)
    for member in [psutil.Process(process.pid), *family]:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)


@pytest.mark.long("runs")
@pytest.mark.parametrize(
    ("backend", "send", "number", "code", "word"),
    [
        ("ray", to_all, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("local", to_all, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("local", to_the_group, signal.SIGINT, 130, "interrupted"),
        ("local", to_the_group, signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_run_on_its_way(command: Command, backend: str, send: Send, number: int, code: int, word: str) -> None:
    # Where the tests run under nohup, the run would ignore a hang-up.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = command.start(*command.train("steps=500", "name=a", "policy.tp=2", f"cluster.backend={backend}"))
    signal.signal(signal.SIGHUP, before)
    metrics = command.runs / "a" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    ended = stopped(process, lambda: send(process, number))
    assert ended == (code, f"megasharp: {word}; continue with --resume\n")


@pytest.mark.long("runs")
def test_while_ray_starts(command: Command, temporary: Path) -> None:
    """The signal comes twice."""
    process = command.start(
        *command.train("steps=500", "name=a", "policy.tp=2", "cluster.backend=ray"),
        environment={"TMPDIR": str(temporary)},
    )

    def servers() -> list[Path]:
        return list(temporary.glob("msray-*/session_*/logs/gcs_server*"))

    def twice() -> None:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGTERM)

    wait_until(servers)
    ended = stopped(process, twice)
    assert ended == (143, "megasharp: stopped by SIGTERM; no step was finished, so the same command restarts it\n")
    assert [*temporary.glob("msray-*"), *temporary.glob("megasharp-*")] == []
    assert "step 1/1" in command.run(*command.train("steps=1", "name=a"))


@pytest.mark.long("runs")
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_whose_time_is_nearly_up(command: Command, backend: str) -> None:
    """It saves where it stands, wants to be started again, and goes on there; children hear the signal too."""
    options = ("name=a", "policy.tp=2", f"cluster.backend={backend}", "checkpoint.every=1000")
    process = command.start(*command.train("steps=500", *options))
    metrics = command.runs / "a" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    code, error = stopped(process, lambda: to_all(process, signal.SIGUSR1))
    step = len(command.rows("a"))
    assert (code, error) == (75, f"megasharp: SIGUSR1: saved after step {step}; continue with --resume\n")
    assert (command.runs / "a" / "checkpoints" / "latest").read_text() == f"step_{step:06d}\n"
    out = command.run(*command.train(f"steps={step + 1}", *options), "--resume")
    assert f"after step {step}" in out
    assert [row["step"] for row in command.rows("a")] == list(range(1, step + 2))
