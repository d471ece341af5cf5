"""A push of weights from the learner to a fleet of engines, by the transport that was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import as_dtype
from megasharp.config.rollout import FleetTransport, SyncConfig
from megasharp.rollout.sglang.client.fleet import Fleet
from megasharp.rollout.sglang.client.launch import LOOPBACK
from megasharp.weight_sync.broadcast import Broadcast
from megasharp.weight_sync.by_files import Disk, SharedMemory
from megasharp.weight_sync.endpoints import PushedVersions, WeightSource
from megasharp.weight_sync.ipc import SharedHandles
from megasharp.weight_sync.receivers import Receivers


class Transport(Protocol):
    """One way to the engines."""

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Bring all weights of both networks to every engine, which then serves them as `version`.

        Engines that fail are lost. Raises UserError when none is left; after any error they are not to serve.
        """
        ...


class FleetSync(PushedVersions):
    """Pushes to a fleet of engines by a transport. Satisfies the loop's `Sync`."""

    def __init__(self, fleet: Fleet, transport: Transport, version: int = -1, memory_version: int = -1) -> None:
        super().__init__(version, memory_version)
        self._fleet = fleet
        self._transport = transport

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int:
        """Push all weights, and those of the memory network if given; returns the new version, one above the last.

        Raises UserError when no engine takes them.
        """
        version = self._version + 1
        memory_version = None if memory is None else self._memory_version + 1
        self._bring(version, memory_version, source, memory)
        self._version = version
        if memory_version is not None:
            self._memory_version = memory_version
        return version

    def push_again(self, source: WeightSource, memory: WeightSource | None = None) -> None:
        """Push the weights of the last push again, under its versions, to engines that came back since.

        Learners must still hold what they held then. Raises UserError when no engine takes them.
        """
        self._bring(self._version, None if memory is None else self._memory_version, source, memory)

    def _bring(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push until an engine has taken everything. Raises RunFailed where all are lost and none may return."""
        whole = memory is not None or self._fleet.settings.memory is None
        while True:
            try:
                with self._fleet.updating(version, whole=whole):
                    self._transport.deliver(version, memory_version, source, memory)
                return
            except RunFailed:
                members = self._fleet.members
                if members.alive() or not members.may_return():
                    raise


def make_transport(
    fleet: Fleet,
    transport: FleetTransport,
    config: SyncConfig,
    *,
    folder: Path | None = None,
    host: str = LOOPBACK,
    beside: tuple[tuple[int, ...], ...] = (),
) -> Transport:
    """Make the transport that `config.transport` stands for. Raises UserError where the fleet cannot use it.

    `folder` is where files are written: None for /dev/shm, required for disk. `host` is the address at which engines
    reach the learner's ranks for a broadcast. `beside` is for ipc: for each engine, the learner's rank on whose device
    each of its ranks is; empty where engines and ranks are in the same order.
    """
    receivers = Receivers(fleet.members, fleet.settings.rollout.tp, config)
    dtype = as_dtype(fleet.settings.dtype)
    match transport:
        case "shared_memory":
            return SharedMemory(receivers, config, dtype, folder)
        case "disk":
            return Disk(receivers, config, dtype, folder)
        case "ipc":
            return SharedHandles(receivers, config, dtype, beside)
        case "nccl" if fleet.settings.device == "cpu":
            raise UserError("sync.transport: nccl needs engines on GPUs; use gloo on a CPU")
        case "gloo" | "nccl":
            return Broadcast(receivers, config, dtype, transport, host)
