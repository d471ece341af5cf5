"""A child that finds its parent gone ends, however late it looks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import multiprocessing, os, sys, time
from megasharp.serving.engine.lifeline import end_with_parent

def child(late):
    print(os.getpid(), flush=True)
    if late:
        # The parent is gone by the time this child looks.
        while os.getppid() == multiprocessing.parent_process().pid:
            time.sleep(0.01)
    end_with_parent()
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[1] == "late",)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_children_end_with_their_parent(when: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, when], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        time.sleep(0.5)
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        child.wait(timeout=10)
    finally:
        if child.is_running():
            child.kill()


def test_a_process_of_its_own_goes_on() -> None:
    """No parent by multiprocessing: an engine's first process, whose life the launcher ties to the run."""
    assert multiprocessing.parent_process() is None
    subprocess.run(
        [sys.executable, "-c", "from megasharp.serving.engine.lifeline import end_with_parent as e; e()"], check=True
    )
