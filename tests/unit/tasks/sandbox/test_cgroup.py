"""Control groups: version 1's for real where this machine lets us, version 2's files on a folder in their place."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs_to_judge import response
from waiting import HANG_S, wait_until

from megasharp.common.records import Outcome
from megasharp.tasks import code
from megasharp.tasks.code import CodeAnswer, CodeVerifier, StdinTest
from megasharp.tasks.sandbox import cgroup
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.cgroup import Group, group, open_folders, own_folders
from megasharp.tasks.sandbox.programs import Limits

FOUR_TIMES = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        taken = bytearray(b"x") * (150 * 2**20)
        time.sleep(3600)
        os._exit(0)
os.wait()
print(input())
"""
KILLED = """
import os, signal, subprocess
from pathlib import Path
from megasharp.tasks.sandbox.cgroup import group, own_folders
with group(own_folders(), 64, 4) as made:
    sleeper = subprocess.Popen([*made.prefix, "sleep", "600"], stdout=subprocess.DEVNULL)
    while str(sleeper.pid) not in (made.folders[0] / "cgroup.procs").read_text().split():
        pass
    print(sleeper.pid, *own_folders(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folders() -> tuple[Path, ...]:
    """Needs a user who may make cgroups."""
    found = own_folders()
    assert found
    return found


@pytest.mark.long("sandbox")
def test_what_the_processes_of_a_program_take_together_is_limited(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is within its own limit; what remains prints the right answer."""
    monkeypatch.setattr(code, "TEST_S", HANG_S)
    answer = CodeAnswer(stdin=(StdinTest("5\n", "5\n"),))
    verifier = CodeVerifier(replace(open_sandbox("none"), limits=Limits(memory_mb=256)), HANG_S)
    verdict = verifier(response(FOUR_TIMES), answer)
    assert (verdict.outcome, verdict.reward, verdict.detail) == (Outcome.ERROR, 0.0, "out of memory")
    assert not [*folders[0].glob("*/")], "its group is removed"
    assert verifier(response("print(input())"), answer).outcome is Outcome.CORRECT


@pytest.mark.long("sandbox")
def test_what_a_killed_owner_left_the_next_start_removes(folders: tuple[Path, ...]) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False, timeout=HANG_S
    )
    assert killed.returncode == -signal.SIGKILL
    sleeper, *left = killed.stdout.split()
    assert all(Path(each).exists() for each in left)
    opened = open_folders(tuple(folder.parent for folder in folders))
    try:
        assert not any(Path(each).exists() for each in left) and all(each.exists() for each in folders)
        wait_until(lambda: not Path("/proc", sleeper, "exe").exists(), lambda: "that its processes are ended")
    finally:
        for each in opened:
            each.rmdir()


@pytest.mark.long("sandbox")
def test_what_a_killed_worker_left_the_next_removes(folders: tuple[Path, ...]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = folders[0] / f"{gone.pid}-0123"
    left.mkdir()
    cgroup._remove_of_killed.cache_clear()
    with group(folders, 64, 4) as made:
        assert not left.exists() and made.folders[0].exists()


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """Version 2's files: a parent that hands memory on, and a group below it."""
    own = tmp_path / "user" / "session"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own / "memory.max").write_text("max\n")
    (own.parent / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    return tmp_path


def test_in_version_2_groups_are_made_beside_the_own_one(unified: Path) -> None:
    assert cgroup._places(unified, "0::/user/session\n") == (unified / "user",)
    assert cgroup._places(unified, "0::/user\n") == (unified / "user",)
    with pytest.raises(OSError, match="hands the controller memory on"):
        cgroup._places(unified, "0::/\n")
    (unified / "user" / "session" / "memory.max").write_text("1000\n")
    with pytest.raises(OSError, match="has a limit on memory, which programs beside it would leave"):
        cgroup._places(unified, "0::/user/session\n")


def test_version_2s_limits_and_what_they_tell(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cgroup.kill"):
        (tmp_path / name).touch()
    cgroup._limit(tmp_path, 2**30, 24)
    written = {each.name: each.read_text() for each in tmp_path.iterdir() if each.read_text()}
    assert written == {"memory.max": str(2**30), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "24"}
    for kills, ran_out in ((0, False), (2, True)):
        (tmp_path / "memory.events").write_text(f"low 0\nmax 7\noom 1\noom_kill {kills}\noom_group_kill 0\n")
        assert Group((tmp_path,)).ran_out() is ran_out
    cgroup._kill(tmp_path)
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_where_it_is_not_allowed_nothing_changes_but_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "_MOUNTED", tmp_path)
    assert own_folders.__wrapped__() == ()
    told = capsys.readouterr().err
    assert told.startswith("megasharp: note: programs run without a cgroup (") and told.count("\n") == 1
    with group((), 64, 4) as made:
        assert (made.prefix, made.ran_out()) == ((), False)
    assert [each.name for each in tmp_path.iterdir()] == ["own"]
