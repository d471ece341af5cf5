"""Real runs of examples/fleet_on_cpu, shortened: started, read, waited for and left without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from waiting import HANG_S, SOON_S

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = "examples/fleet_on_cpu/run.yaml"
SHORT = ("eval.suites=[]", "eval.with_memory=false", "log.tensorboard=false", "data.prompts_per_step=4")
# Two float32 programs on one policy; each may be 6e-5 off at a sharp token (test_client.py). Other weights give 1e-2.
GAP = 3e-4


@contextmanager
def running(runs: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command on the example, in a session of its own; nothing that it started is left afterwards."""
    command = [sys.executable, "-m", "megasharp.cli", "train", EXAMPLE, "--runs", str(runs), *SHORT, *arguments]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family: dict[int, psutil.Process] = {}
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                family[child.pid] = child
            process.kill()
            process.wait()
        for child in family.values():
            if child.is_running():
                child.kill()


def engine_leaders(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Every engine's first process by its number."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        words: list[str] = []
        with suppress(psutil.NoSuchProcess):
            words = child.cmdline()
        if "megasharp.rollout.sglang.engine" in words and words[-1].endswith(".json"):
            found[int(Path(words[-1]).stem.removeprefix("engine_"))] = child
    return found


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the output until a line has `text`; returns what was read."""
    assert process.stdout is not None
    read = ""
    deadline = time.monotonic() + HANG_S
    for line in process.stdout:
        read += line
        if text in line:
            return read
        assert time.monotonic() < deadline, read
    raise AssertionError(f"the run ended without {text!r}:\n{read}")


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while True:
        with suppress(FileNotFoundError):
            if condition():
                return
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.005)


def rows(runs: Path) -> list[dict[str, float]]:
    lines = (runs / "fleet_on_cpu" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == code, output
    return output


def all_gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=SOON_S)
    return not alive
