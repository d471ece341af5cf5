"""Stacks of other processes on request, the kernel's word on them, and who of several is held to be at fault."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S, SOON_S

from megasharp.common import stack_dumps
from megasharp.common.stack_dumps import RankProcess, Report, at_fault, end, examine_all, read_process, state_of

# A rank's thread that has work, in C code that keeps the interpreter's lock, beside one that sleeps.
RANK = """
import ctypes, sys, threading, time
from pathlib import Path
from megasharp.learner.ranks import processes as worker
from megasharp.common.stack_dumps import write_stacks_on_signal

worker.redirect_output(sys.argv[1])
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
time.sleep(0.1)

def in_c_code():
    write_stacks_on_signal(3, Path(sys.argv[1]))
    ctypes.PyDLL(None).sleep(3600)

in_c_code()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[RankProcess, Path]]:
    """A process that says it is rank 3, with its log."""
    log = tmp_path / "rank_3.log"
    process = subprocess.Popen([sys.executable, "-c", RANK, str(log)])
    deadline = time.monotonic() + HANG_S
    while (found := read_process(log)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found is not None
    yield found, log
    process.kill()
    process.wait()


def test_a_process_in_c_code_shows_the_stacks_of_all_its_threads(rank: tuple[RankProcess, Path]) -> None:
    process, log = rank
    assert process.here and process.rank == 3
    log.write_text("something before\n")
    (report,) = examine_all([rank], HANG_S)
    assert report.stacks.count("most recent call first") == 2 and "in in_c_code" in report.stacks
    assert "something before" not in report.stacks
    assert report.state in "SR"


def test_a_stopped_process_shows_none_and_its_state_tells_why(rank: tuple[RankProcess, Path]) -> None:
    os.kill(rank[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    reports = examine_all([rank], 1.0)
    assert time.monotonic() - began < SOON_S
    assert (reports[0].state, reports[0].stacks) == ("T", "")
    assert at_fault(reports) == [(3, "is stopped (state T, as by SIGSTOP)")]


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    gone = RankProcess(3, 2**22 + 1, socket.gethostname())
    assert gone.here and state_of(gone.pid) == "gone"
    log = tmp_path / "rank_3.log"
    log.touch()
    assert at_fault(examine_all([(gone, log)], 0.5)) == [(3, "has ended")]


def test_another_process_by_now_has_the_number(rank: tuple[RankProcess, Path]) -> None:
    """It is neither asked, which would end one that does not listen, nor killed."""
    process, log = rank
    assert process.started > 0 and process.state() in "SR"
    earlier = replace(process, started=process.started - 1)
    assert at_fault(examine_all([(earlier, log)], 0.5)) == [(3, "has ended")]
    end([earlier])
    assert examine_all([rank], HANG_S)[0].stacks.count("most recent call first") == 2
    end([process])
    deadline = time.monotonic() + HANG_S
    while process.state() not in ("Z", "gone") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.state() in ("Z", "gone")


def test_nobody_has_said_who_writes_a_log(tmp_path: Path) -> None:
    assert read_process(tmp_path / "rank_0.log") is None
    (tmp_path / "rank_0.process").write_text("{")
    assert read_process(tmp_path / "rank_0.log") is None


def thread(*frames: str) -> str:
    return "Thread 0x1 (most recent call first):\n" + "".join(f"  {frame}\n" for frame in frames) + "\n"


SERVE = 'File "/a/megasharp/learner/ranks/worker.py", line 90 in serve'
ANSWER = 'File "/a/megasharp/learner/ranks/worker.py", line 110 in _answer_calls'
OTHER_THREAD = thread('File "/a/megasharp/learner/background.py", line 1 in _write')
COLLECTIVE = OTHER_THREAD + thread(
    'File "/a/torch/distributed/distributed_c10d.py", line 7 in all_reduce', ANSWER, SERVE
)
PIPELINE = thread('File "/a/megatron/core/pipeline_parallel/p2p_communication.py", line 7 in recv', ANSWER, SERVE)
REQUEST = 'File "/a/megasharp/learner/ranks/worker.py", line 120 in _request'
IDLE = thread('File "/a/multiprocessing/connection.py", line 395 in _recv', REQUEST, ANSWER, SERVE)
WORKING = thread('File "/a/megasharp/learner/learner.py", line 7 in step', ANSWER, SERVE)
RAY_IDLE = thread('File "/a/ray/_private/worker.py", line 1037 in main_loop')


def reports(*texts: str) -> list[Report]:
    return [Report(rank, "here", "S", text) for rank, text in enumerate(texts)]


@each_case(
    ("texts", "expected"),
    [
        ((COLLECTIVE, WORKING), {1: "is not in the collective that rank 0 waits in (learner.py:7 step)"}),
        ((IDLE, COLLECTIVE), {0: "is not in the collective that rank 1 waits in (connection.py:395 _recv)"}),
        ((COLLECTIVE, PIPELINE), {}),
        ((IDLE, WORKING, IDLE), {1: "is at work while others have nothing to do (learner.py:7 step)"}),
        ((RAY_IDLE, WORKING), {1: "is at work while others have nothing to do (learner.py:7 step)"}),
        ((IDLE, IDLE), {}),
        ((WORKING, WORKING), {}),
        ((WORKING, ""), {1: "writes no stacks (state S)"}),
    ],
)
def test_who_is_at_fault(texts: tuple[str, ...], expected: dict[int, str]) -> None:
    assert dict(at_fault(reports(*texts))) == expected


def test_what_the_kernel_says_comes_first() -> None:
    stopped = Report(2, "here", "T", WORKING)
    in_kernel = Report(3, "here", "D", "")
    writing = Report(4, "here", "D", COLLECTIVE)
    assert [rank for rank, _ in at_fault([*reports(COLLECTIVE, WORKING), stopped, in_kernel, writing])] == [2, 3]


def test_the_signal_is_none_that_slurm_or_a_terminal_sends() -> None:
    assert stack_dumps.STACKS not in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
