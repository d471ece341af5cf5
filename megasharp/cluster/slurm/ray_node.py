"""Ray on one node of a job: its servers as a child of this process, the first node's first.

The network is found, not configured: the address by which the other nodes reach this one, and the adapters for RDMA
that are up. `MEGASHARP_INTERFACE` (a name) or `MEGASHARP_SUBNET` (as 10.1.0.0/16) overrule it, and so does any variable
of gloo or NCCL that is set already. Nodes exchange two files in the attempt's folder, which all of them see: the
address of the first node's Ray (`head`), and the word that all have joined it (`ready`).
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megasharp.cluster.ray_runtime.process_environment import STORE, object_store_bytes, server_environment
from megasharp.common.errors import UserError
from megasharp.common.files import Scratch, parent_for_sockets, write_text
from megasharp.common.group_environment import network_variables
from megasharp.common.parent_death import ended_with_parent

INTERFACE, SUBNET = "MEGASHARP_INTERFACE", "MEGASHARP_SUBNET"
# Any port: nothing is sent, the kernel only says which of its addresses it would send from.
_PORT = 9


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface and one of its IPv4 addresses."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """List this machine's interfaces, loopback last, without link-local addresses, which reach nobody."""
    found = [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_link_local
    ]
    return sorted(found, key=lambda one: ipaddress.ip_address(one.address).is_loopback)


def source_address(peer: str) -> str | None:
    """Return the address from which this machine would send to `peer`; None where it knows no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((peer, _PORT))
        except OSError:
            return None
        return str(asked.getsockname()[0])


def choose(
    here: Sequence[Interface],
    peers: Sequence[str],
    environment: Mapping[str, str],
    source: Callable[[str], str | None] = source_address,
) -> Interface:
    """Choose the interface that reaches the other nodes `peers` (host names). Raises UserError where there is none."""
    named, subnet = environment.get(INTERFACE), environment.get(SUBNET)
    if named:
        return _first([one for one in here if one.name == named], f"{INTERFACE}={named}", here)
    if subnet:
        return _first([one for one in here if _inside(one, subnet)], f"{SUBNET}={subnet}", here)
    for peer in peers:
        address = source(peer)
        found = next((one for one in here if one.address == address), None)
        # The machine's own name leads to itself, which says nothing of the way to others.
        if found is not None and not ipaddress.ip_address(found.address).is_loopback:
            return found
    raise UserError(
        f"node {socket.gethostname()}: no interface leads to {', '.join(peers) or 'other nodes'}; "
        f"set {INTERFACE} or {SUBNET} to one of: {_listed(here)}"
    )


def _inside(one: Interface, subnet: str) -> bool:
    try:
        return ipaddress.ip_address(one.address) in ipaddress.ip_network(subnet, strict=False)
    except ValueError:
        raise UserError(f"{SUBNET}={subnet}: give a subnet such as 10.1.0.0/16") from None


def _first(found: Sequence[Interface], asked: str, here: Sequence[Interface]) -> Interface:
    if not found:
        raise UserError(f"{asked}: node {socket.gethostname()} has no such interface; it has: {_listed(here)}")
    return found[0]


def _listed(here: Sequence[Interface]) -> str:
    return ", ".join(f"{one.name} {one.address}" for one in here)


def variables(interface: Interface, hcas: Sequence[str]) -> dict[str, str]:
    """Return the variables for gloo and NCCL that are not set already."""
    found = network_variables(interface.name, hcas)
    return {name: value for name, value in found.items() if name not in os.environ}


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
        """Start the first node's Ray, which answers at `address`."""
        with socket.socket() as found:
            found.bind((self._interface.address, 0))
            port = int(found.getsockname()[1])
        self.address = f"{self._interface.address}:{port}"
        self._start("--head", f"--port={port}", "--include-dashboard=false")

    def follow(self, address: str) -> None:
        """Start this node's Ray, which joins the one at `address`."""
        self.address = address
        self._start(f"--address={address}")

    def _start(self, *options: str) -> None:
        gpus, store = os.environ.get("SLURM_GPUS_ON_NODE"), max(_GIBIBYTE, int(os.environ.get(STORE, "0")))
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-P", "-m", "ray.scripts.scripts", "start", "--block"),
                f"--node-ip-address={self._interface.address}",
                f"--node-name={self._name}",
                f"--temp-dir={self._scratch.path}",
                f"--object-store-memory={object_store_bytes(store)}",
                *([f"--num-gpus={gpus}"] if gpus else []),
                *options,
            ],
            env={**os.environ, **server_environment(max(self._deadline - time.monotonic(), _ANSWER_S))},
            stdin=subprocess.DEVNULL,
            # A node's program has one thread, so running a function in the child is safe.
            preexec_fn=ended_with_parent(signal.SIGTERM),  # noqa: PLW1509
        )

    def ended(self) -> bool:
        """Return True where the servers have ended, which they do not by themselves."""
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
                while sorted(alive := (alive_file.read_text("utf-8").splitlines() or [""])[-1].split()) != sorted(
                    names
                ):
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
    """Join the first node's Ray, again and again, until all have joined or the file `over` is there.

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
    """Write a file for the other nodes."""
    write_text(folder / name, text + "\n")
