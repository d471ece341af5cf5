"""Some processes at once, failures that hold nobody up, and none that is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megasharp.common.errors import RunFailed
from megasharp.common.stack_dumps import state_of
from megasharp.reporting.sweeps.local import Task, run_all


def task(folder: Path, name: str, program: str) -> Task:
    return Task(name, [sys.executable, "-c", program, str(folder)], folder / "logs" / f"{name}.log")


# Counts the processes that are inside at the same time.
_INSIDE = """
import pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), {name!r}
(folder / f"{{name}}.in").touch()
time.sleep(0.3)
(folder / f"{{name}}.saw").write_text(str(len(list(folder.glob("*.in")))))
(folder / f"{{name}}.in").unlink()
"""


def test_so_many_run_together_and_not_more(tmp_path: Path) -> None:
    told: list[str] = []
    tasks = [task(tmp_path, f"t{i}", _INSIDE.format(name=f"t{i}")) for i in range(5)]
    run_all(tasks, 2, lambda one, code, seconds: told.append(f"{one.name} {code}"))
    assert sorted(told) == [f"t{i} 0" for i in range(5)]
    assert max(int(path.read_text()) for path in tmp_path.glob("*.saw")) <= 2


def test_a_failure_is_told_at_the_end_with_its_last_words(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    tasks = [
        task(tmp_path, "bad", "import sys; print('megasharp: no such file'); sys.exit(2)"),
        task(tmp_path, "b", ""),
    ]
    with pytest.raises(RunFailed, match=r"1 of 2 runs failed \(bad\).*last words: megasharp: no such file") as error:
        run_all(tasks, 1, lambda one, code, seconds: codes.__setitem__(one.name, code))
    assert codes == {"bad": 2, "b": 0} and error.value.exit_code == 1


# A sweep of one run, which says who it is and, where asked, heeds SIGTERM.
_SWEEP = """
import sys
from pathlib import Path
from megasharp.common.exit_codes import run_command
from megasharp.reporting.sweeps.local import Task, run_all
folder = Path(sys.argv[1])
command = [sys.executable, "-c", sys.argv[2], str(folder)]
run_command(lambda: run_all([Task("t", command, folder / "t.log")], 1, lambda *_: None))
"""
_ENDS = """
import os, pathlib, signal, sys, time
def end(number, frame):
    time.sleep(0.5)
    (pathlib.Path(sys.argv[1]) / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
(pathlib.Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
time.sleep(3600)
"""


@pytest.mark.parametrize(("number", "code", "saved"), [(signal.SIGTERM, 143, True), (signal.SIGKILL, -9, False)])
def test_runs_end_with_the_sweep(tmp_path: Path, number: signal.Signals, code: int, saved: bool) -> None:
    sweep = subprocess.Popen([sys.executable, "-c", _SWEEP, str(tmp_path), _ENDS], env=dict(os.environ))
    try:
        pid = _pid(tmp_path / "pid")
        sweep.send_signal(number)
        assert sweep.wait(HANG_S) == code
    finally:
        sweep.kill()
    _gone(pid)
    assert (tmp_path / "saved").exists() is saved


def _pid(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def _gone(pid: int) -> None:
    wait_until(lambda: state_of(pid) in ("Z", "gone"))
