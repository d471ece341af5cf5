"""What runs in a rank's actor: the same rank as in a child process, with TCP to find its peers."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from megasharp.cluster.parts import Part, cut
from megasharp.errors import UserError, one_line
from megasharp.mcore.learner import LearnerSettings
from megasharp.mcore.parallel import COLLECTIVE_TIMEOUT, meet
from megasharp.mcore.rank import POLICY, Rank
from megasharp.ranks.worker import Failed, Returned, redirect_output
from megasharp.stacks import write_stacks_on_signal


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's own facts: its number, its node's address in the cluster, its device, log and CPU threads."""

    rank: int
    address: str
    device: torch.device
    log: Path
    threads: int


class RankActor:
    """One rank. Every call answers with `Returned` or `Failed`; an exception would hide the cause behind Ray's."""

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        self._store: Store | None = None
        self._rank: Rank | None = None

    def process_id(self) -> int:
        """This process on its node."""
        return os.getpid()

    def prepare(self) -> Returned | Failed:
        """Write to the rank's own log, and keep collectives on the cluster's interface."""
        return _answered(self._prepare)

    def host(self, world: int) -> Returned | Failed:
        """Open the store where `world` ranks meet, on this node's address; the value is its port."""
        return _answered(lambda: self._open_store(world))

    def start(self, address: str, port: int, settings: Mapping[str, LearnerSettings]) -> Returned | Failed:
        """Meet the other ranks and build this rank's learners."""
        return _answered(lambda: self._start(address, port, settings))

    def call(self, learner: str, method: str | Callable[..., object], args: tuple[object, ...]) -> Returned | Failed:
        """Call a method of the named learner's part, or a function with that part as its first argument."""
        return _answered(lambda: self._function(learner, method)(*args))

    def stream(self, learner: str, method: str) -> Iterator[list[Part] | Failed]:
        """What a generator method yields, in parts of bounded size; the last item is `Failed` when it raised."""
        try:
            yield from cut(self._function(learner, method)())
        except Exception as error:
            yield _failed(error)

    def close(self) -> None:
        """Forget the parallel groups; the process is ended by whoever started it."""
        if self._rank is not None:
            self._rank.close()
            dist.destroy_process_group()
            self._rank = None

    def _prepare(self) -> None:
        facts = self._facts
        facts.log.parent.mkdir(parents=True, exist_ok=True)
        redirect_output(str(facts.log))
        write_stacks_on_signal(facts.rank, facts.log, _node())
        torch.set_num_threads(facts.threads)
        interface = interface_of(facts.address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)

    def _open_store(self, world: int) -> int:
        listening = socket.create_server((self._facts.address, 0))
        port: int = listening.getsockname()[1]
        # The store is handed a socket, because by itself it would listen on every interface.
        self._store = TCPStore(
            self._facts.address,
            port,
            world,
            is_master=True,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return port

    def _start(self, address: str, port: int, settings: Mapping[str, LearnerSettings]) -> None:
        world, device = settings[POLICY].layout.world, self._facts.device
        if self._store is None:
            self._store = TCPStore(
                address, port, world, is_master=False, timeout=COLLECTIVE_TIMEOUT, wait_for_workers=False
            )
        meet(self._store, self._facts.rank, world, device)
        self._rank = Rank(settings, device)

    def _function(self, learner: str, method: str | Callable[..., object]) -> Callable[..., Any]:
        assert self._rank is not None, "the rank has not started"
        part = self._rank.learners[learner]
        if isinstance(method, str):
            found: Callable[..., Any] = getattr(part, method)
            return found
        return lambda *args: method(part, *args)


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def interface_of(address: str) -> str:
    """The network interface that has this address; collectives listen there and nowhere else."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise UserError(f"this node has no network interface with address {address}, by which Ray knows it")


def _answered(work: Callable[[], object]) -> Returned | Failed:
    try:
        return Returned(work())
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Failed:
    traceback.print_exc()
    sys.stderr.flush()
    return Failed(one_line(error), isinstance(error, UserError))
