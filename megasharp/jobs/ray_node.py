"""Ray on one node of a job: its servers as a child of this process, the first node's first.

What nodes have to tell each other lies in the attempt's folder, which all of them see: where the first node's Ray
answers (`head`), and that all have joined it (`ready`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megasharp.cluster.environment import object_store_bytes, server_environment
from megasharp.errors import UserError
from megasharp.files import write_text
from megasharp.jobs.network import Interface
from megasharp.orphans import ended_with_parent
from megasharp.scratch import Scratch, parent_for_sockets

_RETRY_S = 2.0
_POLL_S = 0.5
_STOP_S = 15.0
_ANSWER_S = 60.0
# Ending Ray on the first node may take this long before it says who is missing.
_VERDICT_S = 60.0
_GIBIBYTE = 1 << 30

# Names of the nodes that are alive, a line each time they change; asked in a process of its own, because Ray may wait
# for ever, and only one room imports it.
_WATCH = """
import sys, time
from ray._raylet import GcsClient
client, before = GcsClient(address=sys.argv[1]), None
while True:
    now = sorted(node.node_name for node in client.get_all_node_info().values() if node.state == 0)
    if now != before:
        print(*now, flush=True)
    before = now
    time.sleep(1)
"""


class RayNode:
    """Ray's servers on this node, known to Ray by `name`. Closing ends them and what they started."""

    def __init__(self, name: str, interface: Interface, deadline: float) -> None:
        self._name = name
        self._interface = interface
        self._deadline = deadline
        self._scratch = Scratch("msray-", parent_for_sockets())
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def lead(self) -> None:
        """Start the first node's Ray; `address` says where it answers."""
        self.address = f"{self._interface.address}:{_free_port(self._interface.address)}"
        self._start("--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false")

    def follow(self, address: str) -> None:
        """Start this node's Ray, which joins the one at `address`."""
        self.address = address
        self._start(f"--address={address}")

    def _start(self, *options: str) -> None:
        gpus = os.environ.get("SLURM_GPUS_ON_NODE")
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-P", "-m", "ray.scripts.scripts", "start", "--block"),
                f"--node-ip-address={self._interface.address}",
                f"--node-name={self._name}",
                f"--temp-dir={self._scratch.path}",
                f"--object-store-memory={object_store_bytes(_GIBIBYTE)}",
                *([f"--num-gpus={gpus}"] if gpus else []),
                *options,
            ],
            env={**os.environ, **server_environment(max(self._deadline - time.monotonic(), _ANSWER_S))},
            stdin=subprocess.DEVNULL,
            # A node's program has one thread, so running a function in the child is safe.
            preexec_fn=ended_with_parent(signal.SIGTERM),  # noqa: PLW1509
        )

    def ended(self) -> bool:
        """Whether the servers have ended, which they do not by themselves."""
        return self._process is None or self._process.poll() is not None

    def await_nodes(self, names: Sequence[str], check: Callable[[], None]) -> None:
        """Wait until all have joined. Raises UserError naming those that have not by the deadline.

        `check` is called again and again, and raises what is to end the wait.
        """
        alive_file = self._scratch.path / "alive"
        command = [sys.executable, "-P", "-c", _WATCH, self.address]
        environment = {**os.environ, **server_environment(_ANSWER_S)}
        with alive_file.open("wb") as output, subprocess.Popen(command, stdout=output, env=environment) as watch:
            try:
                while sorted(alive := _last_line(alive_file)) != sorted(names):
                    check()
                    if time.monotonic() > self._deadline or self.ended():
                        why = "Ray ended on the first node" if self.ended() else "the deadline has passed"
                        missing = sorted(set(names) - set(alive))
                        raise UserError(f"node(s) {', '.join(missing)} did not join Ray at {self.address}: {why}")
                    time.sleep(_POLL_S)
            finally:
                watch.kill()

    def close(self) -> None:
        """End the servers and all that they started; harmless when they are gone."""
        if self._process is not None and self._process.poll() is None:
            family = [*psutil.Process(self._process.pid).children(recursive=True)]
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
            self._process.wait()
            _, left = psutil.wait_procs(family, timeout=_STOP_S)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._scratch.close()


def follow_until_ready(node: RayNode, folder: Path, deadline: float, over: Path, check: Callable[[], None]) -> None:
    """Join the first node's Ray, again and again, until all have joined or the file `over` says that it is over.

    Raises UserError after the deadline, with what was missing. `check` is called as in `await_nodes`. A first node that
    has an address names all that are missing, which a node that fails before it would keep from being read: it gets
    `_VERDICT_S` more.
    """
    head, ready = folder / "head", folder / "ready"
    while not ready.exists() and not over.exists():
        check()
        if time.monotonic() > deadline + (_VERDICT_S if head.exists() else 0.0):
            missing = f"no address in {head}" if not head.exists() else f"Ray at {head.read_text().strip()} took nobody"
            raise UserError(f"node {socket.gethostname()} could not join the job's Ray: {missing}, and time is over")
        if node.ended() and head.exists():
            node.follow(head.read_text(encoding="utf-8").strip())
            time.sleep(_RETRY_S)
        time.sleep(_POLL_S)


def publish(folder: Path, name: str, text: str) -> None:
    """Tell the other nodes."""
    write_text(folder / name, text + "\n")


def _last_line(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[-1].split() if lines else []


def _free_port(address: str) -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])
