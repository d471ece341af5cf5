"""A spawned child ends with the engine's first process, from the import of its function's module on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S

# As `server.py` does it: spawned children import this module to find their function.
ENGINE = """
import multiprocessing, os, sys, time
from megasharp.rollout.sglang.engine import lifeline

LATE = "late" in sys.argv

if __name__ == "__mp_main__":
    print(os.getpid(), flush=True)
    # The parent is gone by the time a late child looks.
    while LATE and os.getppid() == int(os.environ["MEGASHARP_ENGINE_PID"]):
        time.sleep(0.01)
    lifeline.end_with_parent()
    # SGLang's imports, in which the parent may end.
    time.sleep(3600)

def child():
    pass

if __name__ == "__main__":
    lifeline.end_with_parent()
    lifeline.publish()
    lifeline.end_with_parent()
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_children_end_with_their_parent(tmp_path: Path, when: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    parent = subprocess.Popen([sys.executable, str(script), when], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        time.sleep(0.5)
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        child.wait(timeout=HANG_S)
    finally:
        if child.is_running():
            child.kill()
