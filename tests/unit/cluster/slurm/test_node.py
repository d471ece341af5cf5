"""The program of a job's node, as a process of its own: exit codes, signals, and the file that says time is up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, SOON_S, is_ignored, is_pending, wait_until

# Says that it is there, and by which signal it was ended.
_LISTENS = """
import pathlib, signal, sys, time
def heard(number, _):
    sys.exit(75 if number == signal.SIGUSR1 else 128 + number)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, heard)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
pathlib.Path(sys.argv[1], "listens").touch()
time.sleep(3600)
"""


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGASHARP_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "megasharp.cluster.slurm.node", "--folder", str(folder), "--", sys.executable, *command],
        env=kept,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(node: subprocess.Popen[str]) -> int:
    try:
        return node.wait(HANG_S)
    finally:
        node.kill()


@pytest.mark.parametrize(
    ("program", "code"), [("pass", 0), ("import sys; sys.exit(2)", 2), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_commands_end_is_the_nodes_and_stands_in_a_file(tmp_path: Path, program: str, code: int) -> None:
    assert ended(started(tmp_path, "-c", program)) == code
    assert (tmp_path / "exit_code").read_text() == f"{code}\n"


def test_the_file_becomes_usr1_and_usr1_itself_ends_nobody(tmp_path: Path) -> None:
    node = started(tmp_path, "-c", _LISTENS, str(tmp_path))
    wait_until((tmp_path / "listens").exists)
    assert is_ignored(node.pid, signal.SIGUSR1)
    node.send_signal(signal.SIGUSR1)
    (tmp_path / "time_is_up").touch()
    assert ended(node) == 75


def test_usr1_waits_until_the_command_can_hear_it(tmp_path: Path) -> None:
    begun = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'begun').touch()\n"
        "while not pathlib.Path(sys.argv[1], 'asked').exists(): time.sleep(0.01)\n"
    )
    node = started(tmp_path, "-c", begun + _LISTENS, str(tmp_path))
    wait_until((tmp_path / "begun").exists)
    (tmp_path / "time_is_up").touch()
    (command,) = psutil.Process(node.pid).children()
    wait_until(lambda: is_pending(command.pid, signal.SIGUSR1))
    (tmp_path / "asked").touch()
    assert ended(node) == 75


def test_nothing_is_started_when_time_is_up_before(tmp_path: Path) -> None:
    (tmp_path / "time_is_up").touch()
    assert ended(started(tmp_path, "-c", _LISTENS, str(tmp_path))) == 75
    assert (tmp_path / "exit_code").read_text() == "75\n"
    assert not (tmp_path / "listens").exists()


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    node = started(tmp_path, "-c", _LISTENS, str(tmp_path))
    wait_until((tmp_path / "listens").exists)
    node.terminate()
    assert ended(node) == 143


# The program, where a process that does nothing stands in for Ray's servers: nobody ever joins it.
_JOINS = """
import subprocess
from megasharp.common.exit_codes import run_command
from megasharp.cluster.slurm import node, ray_node
def start(self, *options):
    self._process = subprocess.Popen(["sleep", "600"])
ray_node.RayNode._start = start
run_command(node.main)
"""


def joining(folder: Path, number: int, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGASHARP_"))}
    place = {"MEGASHARP_NODES": "first,second", "SLURM_NODEID": str(number), "MEGASHARP_INTERFACE": "lo"}
    return subprocess.Popen(
        [sys.executable, "-c", _JOINS, "--folder", str(folder), "--", "true"],
        env={**kept, **place, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_who_is_missing_is_the_first_nodes_to_say(tmp_path: Path) -> None:
    """A node that fails before it ends the job's step, so that only the latecomer's own line is read."""
    (tmp_path / "head").write_text("127.0.0.1:1\n")
    node = joining(tmp_path, 1, MEGASHARP_JOIN_SECONDS="0.1")
    wait_until(lambda: is_ignored(node.pid, signal.SIGUSR1))
    time.sleep(1.0)
    assert node.poll() is None
    (tmp_path / "exit_code").write_text("2\n")
    assert ended(node) == 0


# The first node, whose Ray ends a while after all have joined.
_LOSES_RAY = """
import subprocess
from megasharp.common.exit_codes import run_command
from megasharp.cluster.slurm import node, ray_node
def start(self, *options):
    self._process = subprocess.Popen(["sh", "-c", "while ! [ -e listens ]; do sleep 0.1; done"])
ray_node.RayNode._start = start
ray_node.RayNode.await_nodes = lambda self, names, check: None
run_command(node.main)
"""


def test_a_command_whose_ray_ends_is_killed_and_the_node_is_named(tmp_path: Path) -> None:
    """It would start again and again under a Ray that is gone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGASHARP_"))}
    node = subprocess.Popen(
        [sys.executable, "-c", _LOSES_RAY, "--folder", str(tmp_path), "--", sys.executable, "-c", _LISTENS, "."],
        env={**kept, "MEGASHARP_NODES": "first,second", "SLURM_NODEID": "0", "MEGASHARP_INTERFACE": "lo"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "listens").exists)
    family = psutil.Process(node.pid).children(recursive=True)
    assert ended(node) == 1
    assert (tmp_path / "ray_ended").read_text() == "first\n" and (tmp_path / "exit_code").read_text() == "1\n"
    assert not psutil.wait_procs(family, timeout=SOON_S)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise to a child is Linux's")
def test_a_node_that_is_killed_leaves_no_ray(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/bash\necho $* >{tmp_path / 'given'}\necho $$ >{tmp_path / 'pid'}\nexec sleep 3600\n")
    ray.chmod(0o755)
    # Only Ray is started with this Python, and is this script instead.
    program = f"""
import sys
from megasharp.cluster.ray_runtime.process_environment import server_environment
from megasharp.cluster.slurm import ray_node
from megasharp.cluster.slurm.ray_node import Interface
node = ray_node.RayNode("first", Interface("lo", "127.0.0.1"), 1e9)
sys.executable = {str(ray)!r}
node.lead()
import time
time.sleep(3600)
"""
    # No more than half of what is free there.
    store = min(1_500_000_000, shutil.disk_usage("/dev/shm").free // 2)
    wanted = {"MEGASHARP_RAY_STORE_BYTES": "1500000000"}
    node = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **wanted})
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    assert store < 1_500_000_000 or "--object-store-memory=1500000000" in (tmp_path / "given").read_text()
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    node.kill()
    node.wait()
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


def test_time_that_is_up_ends_the_wait_for_nodes_and_the_job_is_queued_again(tmp_path: Path) -> None:
    node = joining(tmp_path, 0)
    wait_until((tmp_path / "head").exists)
    (tmp_path / "time_is_up").touch()
    assert ended(node) == 75 and (tmp_path / "exit_code").read_text() == "75\n"
    assert node.stderr is not None and "time is nearly up and not all nodes have joined" in node.stderr.read()


@pytest.mark.parametrize(("number", "file"), [(0, "head"), (1, None)])
def test_a_signal_ends_the_wait_for_nodes_and_is_the_exit_code(tmp_path: Path, number: int, file: str | None) -> None:
    node = joining(tmp_path, number)
    # The follower waits for a file of the first node's, and says nothing; USR1 is the last that it sets.
    wait_until((tmp_path / file).exists if file else lambda: is_ignored(node.pid, signal.SIGUSR1))
    node.terminate()
    assert ended(node) == 143
    assert node.stderr is not None
    assert "megasharp: stopped by SIGTERM; the command was not started" in node.stderr.read()
    assert [path.read_text() for path in tmp_path.glob("exit_code")] == (["143\n"] if number == 0 else [])


def test_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megasharp.cluster.slurm.node", "--folder"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "usage:" in done.stderr
