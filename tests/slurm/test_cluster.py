"""The tests' own Slurm: it ends with them, however they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, wait_for
from waiting import SOON_S

pytestmark = pytest.mark.long("slurm")

HOLDS_ONE = """
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cluster import Cluster
cluster = Cluster(Path(sys.argv[1]))
cluster.call("sbatch", "--output=/dev/null", "--wrap", "sleep 600")
print("up", flush=True)
time.sleep(600)
"""


def belonging(folder: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]


def test_it_does_not_outlive_tests_that_are_killed(slurm: Cluster) -> None:
    """Another beside that of the session, whose holder is killed while a job runs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    command = [sys.executable, "-c", HOLDS_ONE, str(folder), str(Path(__file__).parent)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "up\n"
    daemons = [psutil.Process(int(path.read_text())) for path in folder.glob("*.pid")]
    assert len(daemons) == 3
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    _, left = psutil.wait_procs(daemons, timeout=SOON_S)
    assert left == []
    wait_for(lambda: not folder.exists() and not belonging(folder), 30, lambda: str(belonging(folder)))
    assert slurm.call("sinfo", "--noheader"), "the session's own goes on"
