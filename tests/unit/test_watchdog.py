"""A driver that stands still ends in bounded time with one line, wherever its main thread is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import HANG_S, SOON_S

from megasharp.common.stack_dumps import Report
from megasharp.common.watchdog import STACKS_FILE, verdict

# The stage `update` may take BUDGET seconds; argv: the logs' folder, the number of ranks.
DRIVER = """
import ctypes, sys, threading, time
from pathlib import Path
from megasharp.common import signals
from megasharp.common.exit_codes import run_command
from megasharp.metrics.clock import StageClock
from megasharp.common.watchdog import Budget, Watchdog, Watched

def last_words(error):
    print("last words:", error)
    sys.stdout.flush()

def main():
    clock = StageClock()
    watched = Watched(clock.present, Path(sys.argv[1]), int(sys.argv[2]))
    budget = Budget(BUDGET, "guard.stage_timeout_s")
    named = {"eval": Budget(None, "guard.long_stages.eval")}
    with Watchdog(watched, budget, named, last_words, grace_s=GRACE):
        BODY
        signals.check()

run_command(main)
"""


def driver(
    body: str, logs: Path, ranks: int = 0, *, budget: float = 1.0, grace: float = 1.0
) -> tuple[int, str, str, float]:
    """Exit code, both streams and seconds of a driver whose watched body is this."""
    script = DRIVER.replace("BUDGET", str(budget)).replace("GRACE", str(grace))
    script = script.replace("BODY", body.replace("\n", "\n        "))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, str(logs), str(ranks)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


LINE = "megasharp: stage update has run for more than 1 s (guard.stage_timeout_s): "


def test_a_main_thread_that_waits_in_python_is_interrupted(tmp_path: Path) -> None:
    code, out, err, _ = driver("with clock.stage('update'):\n    threading.Event().wait()", tmp_path, grace=HANG_S)
    assert code == 1 and err.startswith(LINE + "the driver is in threading.py:") and err.count("\n") == 1
    assert out == ""
    text = (tmp_path / STACKS_FILE).read_text()
    assert "Thread MainThread" in text and "Thread watchdog" in text and text.startswith(LINE[len("megasharp: ") :])


def test_a_main_thread_that_stays_in_c_code_is_not_waited_for(tmp_path: Path) -> None:
    """A lock that is taken twice: unlike a sleep, no signal ends that."""
    lock = "mutex = ctypes.create_string_buffer(64)\nlock = ctypes.CDLL(None).pthread_mutex_lock\n"
    body = f"{lock}with clock.stage('update'):\n    lock(mutex), lock(mutex)"
    code, out, err, seconds = driver(body, tmp_path)
    assert code == 1 and err.startswith(LINE) and err.count("\n") == 1
    assert out == "last words: " + err.removeprefix("megasharp: ")
    assert seconds < 4 * SOON_S


def test_a_main_thread_that_keeps_the_interpreters_lock_too(tmp_path: Path) -> None:
    """No thread of Python's runs: faulthandler's timer shows the stacks and ends the process."""
    body = "with clock.stage('update'):\n    time.sleep(0.6)\n    ctypes.PyDLL(None).sleep(3600)"
    code, _, err, seconds = driver(body, tmp_path)
    assert code == 1 and "Timeout" in err and "Current thread" not in err and "Thread" in err
    assert seconds < 4 * SOON_S


def test_a_watchdog_that_fails_leaves_the_end_to_the_timer(tmp_path: Path) -> None:
    body = (
        "import megasharp.common.watchdog as module\nmodule._LOOK_S = 1.0\nmodule.examine_all = None\n"
        "module._by_node = lambda *_: 1 / 0\nwith clock.stage('update'):\n    threading.Event().wait()"
    )
    code, _, err, seconds = driver(body, tmp_path)
    assert code == 1 and "ZeroDivisionError" in err and "Timeout" in err
    assert seconds < 4 * SOON_S


def test_a_drop_of_the_error_does_not_let_the_run_go_on(tmp_path: Path) -> None:
    body = "try:\n    with clock.stage('update'):\n        time.sleep(3600)\nexcept Exception:\n    pass"
    code, _, err, _ = driver(body, tmp_path)
    assert code == 1 and err.startswith(LINE)


def test_stages_within_their_budgets_and_stages_without_one(tmp_path: Path) -> None:
    """Many short ones of the first kind take longer than one may, and so does one of the second kind."""
    body = "for _ in range(25):\n    with clock.stage('update'):\n        time.sleep(0.1)\n"
    body += "with clock.stage('eval'):\n    time.sleep(2.5)"
    code, _, err, _ = driver(body, tmp_path, budget=2.0)
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []


def test_what_lies_between_stages_is_watched(tmp_path: Path) -> None:
    code, _, err, _ = driver("time.sleep(3600)", tmp_path)
    assert code == 1 and "stage other has run" in err


def test_ranks_that_never_started_are_named(tmp_path: Path) -> None:
    _, _, err, _ = driver("time.sleep(3600)", tmp_path, ranks=2)
    assert "rank 0 has not started; rank 1 has not started; stacks of all processes: " in err


@pytest.mark.parametrize(("silent", "ending"), [(2, "state S)"), (7, "and 3 more")])
def test_the_line_names_a_few(silent: int, ending: str) -> None:
    line = verdict([Report(rank, "", "S", "") for rank in range(silent)], [])
    assert line.startswith("rank 0 writes no stacks") and line.endswith(ending)
