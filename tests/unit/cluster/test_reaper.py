"""The reaper with stand-ins for Ray's servers: what it ends, and when it tells of one that ended by itself."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, wait_until

from megasharp.cluster.ray_runtime import reaper

TOLD = "megasharp: Ray's raylet ended, and with it this run; continue with --resume\n"
# What takes a second may take this long where ten other processes want the same core.


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[psutil.Popen]]:
    """Processes that bear the names of Ray's."""
    processes = []
    for name in ("gcs_server", "raylet", "agent"):
        shutil.copy("/bin/sleep", tmp_path / name)
        processes.append(psutil.Popen([str(tmp_path / name), "600"]))
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("ended", "last", "told"),
    [(None, "", ""), ("raylet", "", TOLD), ("raylet", reaper.CLOSING, ""), ("agent", "", "")],
)
def test_only_a_server_that_ended_first_is_told(
    tmp_path: Path, servers: list[psutil.Popen], ended: str | None, last: str, told: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-P", "-m", reaper.__name__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        print(reaper.described(servers), file=process.stdin, flush=True)
        wait_until(lambda: watched(process) == 2)
        if last:
            print(last, file=process.stdin, flush=True)
            wait_until(lambda: watched(process) == 0)
        for server in servers:
            if server.name() == ended:
                server.kill()
        if told:
            wait_until(lambda: watched(process) == 1)
        _, said = process.communicate(timeout=HANG_S)
    assert said == told
    assert all(server.wait(HANG_S) is not None for server in servers), "all are ended"
    assert not folder.exists()


# Starts a reaper that waits half a second, and waits.
DRIVER = """
import subprocess, sys, time
command = [sys.executable, "-P", "-m", "megasharp.cluster.ray_runtime.reaper", sys.argv[1], "0.5"]
reaper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
print(sys.argv[2], file=reaper.stdin, flush=True)
time.sleep(600)
"""


def test_a_driver_that_goes_on_without_a_raylet_is_killed(tmp_path: Path, servers: list[psutil.Popen]) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "folder"), reaper.described(servers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        wait_until(lambda: any(watched(child) == 2 for child in psutil.Process(driver.pid).children()))
        servers[1].kill()
        _, said = driver.communicate(timeout=HANG_S)
    assert (driver.returncode, said) == (-signal.SIGKILL, TOLD)
    assert all(server.wait(HANG_S) is not None for server in servers), "all are ended"


def watched(process: subprocess.Popen[str] | psutil.Process) -> int:
    """How many servers it waits for the end of: an interpreter that starts opens and closes files of other kinds."""
    kinds = []
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            kinds.append(descriptor.readlink().name)
    return sum("pidfd" in kind for kind in kinds)
