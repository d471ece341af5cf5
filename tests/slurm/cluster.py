"""A real Slurm on this machine: munged, slurmctld and one slurmd per node, in a folder and on ports of their own.

Nothing of the system's is used but the programs: key, sockets, configuration, state, logs and pid files lie in the
folder, and the daemons are ended by their pid files. Needs root, as slurmd does to start jobs.

`python cluster.py FOLDER` ends the Slurm in a folder, and removes the folder, once its standard input ends: so it does
not outlive tests that were killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
START_S = 500.0
STOP_S = 300.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
JobRequeue=1
KillWait=5
BatchStartTimeout=60
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
"""


def problem() -> str | None:
    """Why no Slurm can be started here, in one line that says what to do; None when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here: run .ci/packages as root (slurmctld, slurmd, slurm-client, munge)"
    if os.geteuid() != 0:
        return "a Slurm for tests needs root: slurmd starts jobs as their users; run the tests as root"
    return None


def search_path() -> str:
    """PATH with the folders where Debian puts daemons."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Done:
    """A job's end as Slurm tells it."""

    state: str
    exit_code: int
    restarts: int


class Cluster:
    """Slurm, running. `nodes` are named node1, node2, ... and are all this machine."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        self.folder = folder
        self.names = [f"node{number + 1}" for number in range(nodes)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").mkdir(exist_ok=True)
        self._guard = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._configure()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return environment_of(self.folder)

    def _configure(self) -> None:
        ports = free_ports(1 + len(self.names))
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(host=host, folder=self.folder, controller_port=ports[0])
        cpus = os.cpu_count() or 1
        for name, port in zip(self.names, ports[1:], strict=True):
            # One core with as many threads would be shared whole; so many cores can be given out one by one.
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000\n"
        text += f"PartitionName=main Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        # Without this file slurmd looks for cgroups of its own at the system's place.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        paths = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._run(
            "munged",
            "--force",
            f"--key-file={key}",
            f"--socket={paths['socket']}",
            f"--pid-file={paths['pid']}",
            f"--log-file={paths['log']}",
            f"--seed-file={paths['seed']}",
        )
        self._run("slurmctld", "-c")
        for name in self.names:
            self._run("slurmd", "-N", name)
        wait_for(self._idle, START_S, lambda: f"no idle nodes; logs in {self.folder}")

    def _idle(self) -> bool:
        out = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return out.returncode == 0 and out.stdout.split() == ["idle"] * len(self.names)

    def _run(self, *command: str) -> None:
        # Daemons keep what they inherit; a pipe of ours would never come to its end.
        with (self.folder / "start.log").open("a") as log:
            subprocess.run(command, env=self.environment, stdout=log, stderr=log, check=True, cwd=self.folder)

    def call(self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands, or ours; returns its standard output."""
        done = subprocess.run(
            command,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=START_S,
        )
        assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str, limit: float) -> Done:
        """Wait until a job is over. A requeued one, which waits to begin again, is not."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_for(lambda: self.show(job)["JobState"] in over, limit, lambda: f"job {job}: {self.show(job)}")
        told = self.show(job)
        return Done(told["JobState"], int(told["ExitCode"].split(":")[0]), int(told["Restarts"]))

    def close(self) -> None:
        """End all of it, and remove its folder."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def environment_of(folder: Path) -> dict[str, str]:
    """What Slurm's commands need to find the cluster in a folder."""
    return {**os.environ, "PATH": search_path(), "SLURM_CONF": str(folder / "slurm.conf")}


def shut_down(folder: Path) -> None:
    """Cancel what runs, then end the daemons by their pid files: those of the nodes first."""

    def ask(*command: str) -> str:
        return subprocess.run(
            command, env=environment_of(folder), capture_output=True, text=True, check=True, timeout=STOP_S
        ).stdout

    with suppress(AssertionError, subprocess.SubprocessError, OSError):
        ask("scancel", "--user=root")
        wait_for(lambda: not ask("squeue", "--noheader").strip(), STOP_S, lambda: "jobs are left")
    for pid_file in (*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munge.pid"):
        end(pid_file)


def end(pid_file: Path) -> None:
    """SIGTERM for the daemon of a pid file, SIGKILL where it does not heed it."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            if not Path(f"/proc/{pid}").exists():
                return
            time.sleep(0.05)


def wait_for(ready: Callable[[], object], limit: float, otherwise: Callable[[], str]) -> None:
    """Ask again and again; fails with what `otherwise` says after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.25)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def main(folder: Path) -> None:
    """Whoever started this holds its standard input open; it ends with them, however they do."""
    sys.stdin.read()
    shut_down(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
