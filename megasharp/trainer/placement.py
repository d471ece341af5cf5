"""The placement of a run's processes: on this machine, or in slots that Ray reserves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from megasharp.cluster.ray_runtime.slot_layout import small_stores
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.common.group_environment import compute_capability, in_order, keep_to
from megasharp.common.watchdog import There
from megasharp.learner.learner import POLICY, LearnerSettings
from megasharp.learner.parallel import device_of_rank
from megasharp.learner.ranks.all_ranks import OneRank, Ranks
from megasharp.rollout.sglang.client.fleet import LocalStarter
from megasharp.rollout.sglang.client.launch import EngineHandle, FleetSettings, launch
from megasharp.rollout.sglang.client.members import Starter
from megasharp.trainer.early_ranks import fork_soon
from megasharp.trainer.plan import ray_store_bytes
from megasharp.trainer.resolve.devices import check_enough, check_names, cpu_threads, device_of, gpus_here
from megasharp.trainer.resolve.engine_settings import cluster_layout, group_variables
from megasharp.trainer.resolve.resolved_run import ResolvedRun

if TYPE_CHECKING:
    from megasharp.cluster.ray_runtime.session import RaySession
    from megasharp.cluster.ray_runtime.slots import Slots

_LOOPBACK = "127.0.0.1"


class Placement(Protocol):
    """Starts what a run needs; what it started ends with it at the latest."""

    @property
    def address(self) -> str:
        """The address at which engines reach the learner's first rank."""
        ...

    def ranks(self, settings: Mapping[str, LearnerSettings], device: torch.device, logs: Path) -> Ranks:
        """Start the learners' ranks."""
        ...

    def engines(self, settings: FleetSettings) -> list[EngineHandle]:
        """Start engines and wait until all answer. Raises UserError when one does not start."""
        ...

    def processes(self, world: int) -> int:
        """Return how many of `world` ranks are processes of their own."""
        ...

    @property
    def there(self) -> There | None:
        """The way to call a function on another node; None where there is none."""
        ...

    def starter(self, settings: FleetSettings) -> Starter:
        """Return an object that restarts one of these engines."""
        ...

    def close(self) -> None:
        """Release the reserved slots."""
        ...


class LocalPlacement:
    """One rank in this process, several in child processes; engines as child processes.

    On GPUs rank `i` has the machine's `i`-th, and engines those that they share with ranks, or those behind them.
    """

    def __init__(self, resolved: ResolvedRun) -> None:
        self._resolved = resolved
        self._engine_gpus: list[list[str]] = []
        if device_of(resolved.config) == "cuda":
            gpus = gpus_here(resolved.config)
            check_enough(resolved.config, gpus)
            check_names(resolved.config, gpus)
            layout = cluster_layout(resolved.config, len(gpus))
            self._engine_gpus = [[gpus[slot] for slot in layout.of_engine(i)] for i in range(layout.engines)]

    @property
    def address(self) -> str:
        """The loopback interface."""
        return _LOOPBACK

    def ranks(self, settings: Mapping[str, LearnerSettings], device: torch.device, logs: Path) -> Ranks:
        """Start ranks as child processes; a single rank is this process."""
        config, layout = self._resolved.config, settings[POLICY].layout
        variables = group_variables(config)
        if layout.world == 1:
            # Engines may join a group of this process.
            os.environ.update(variables)
            keep_to("lo")
            return OneRank(settings, device_of_rank(device, 0))
        from megasharp.learner.ranks.processes import ProcessRanks

        if device.type == "cpu":
            fork_soon()
        if device.type == "cuda":
            variables |= in_order(layout.splits_tensors, compute_capability(), os.environ)
        threads = cpu_threads(self._resolved.architecture, layout.world, config.deterministic)
        return ProcessRanks(settings, device, logs, threads, variables)

    def engines(self, settings: FleetSettings) -> list[EngineHandle]:
        """Start engines in process groups of their own."""
        return list(launch(self._placed(settings)))

    def processes(self, world: int) -> int:
        """Count child processes: a single rank has none."""
        return 0 if world == 1 else world

    @property
    def there(self) -> There | None:
        """None: everything is on this machine."""
        return None

    def starter(self, settings: FleetSettings) -> Starter:
        """Return a starter that uses the same GPUs."""
        return LocalStarter(self._placed(settings))

    def _placed(self, settings: FleetSettings) -> FleetSettings:
        return replace(settings, gpus=self._engine_gpus)

    def close(self) -> None:
        """Do nothing, because nothing is reserved."""


class RayPlacement:
    """Actors in reserved slots; Ray is imported only here and below."""

    def __init__(self, resolved: ResolvedRun, session: RaySession, slots: Slots) -> None:
        self._resolved = resolved
        self._session = session
        self._slots = slots

    @property
    def address(self) -> str:
        """The node of the first rank."""
        return self._slots.seats[self._slots.layout.of_rank(0)].node

    def ranks(self, settings: Mapping[str, LearnerSettings], device: torch.device, logs: Path) -> Ranks:
        """Start an actor for each rank."""
        from megasharp.cluster.ray_runtime.ranks import RayRanks

        config, world = self._resolved.config, settings[POLICY].layout.world
        threads = cpu_threads(self._resolved.architecture, world, config.deterministic)
        return RayRanks(settings, device, self._slots, logs, threads, group_variables(config))

    def engines(self, settings: FleetSettings) -> list[EngineHandle]:
        """Start an actor for each engine, which starts it on its node."""
        from megasharp.cluster.ray_runtime.engine_actors import launch_on_cluster

        return list(launch_on_cluster(settings, self._slots))

    def processes(self, world: int) -> int:
        """Count all of them."""
        return world

    @property
    def there(self) -> There | None:
        """A task of Ray's on that node."""
        from megasharp.cluster.ray_runtime.session import there

        return there

    def starter(self, settings: FleetSettings) -> Starter:
        """Return a starter that uses the engine's own slots."""
        from megasharp.cluster.ray_runtime.engine_actors import ClusterStarter

        return ClusterStarter(settings, self._slots)

    def close(self) -> None:
        """Give the slots back, then leave Ray, or end the one that was started here."""
        try:
            self._slots.close()
        finally:
            self._session.close()


def check_placement(resolved: ResolvedRun) -> None:
    """Refuse GPUs that this machine does not have, and starters of ranks, before anything is written.

    Ray refuses what it does not have itself.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"torchrun started {os.environ['WORLD_SIZE']} of this command, and each would train the whole run; give "
            "`megasharp train` once: it starts the ranks of policy.dp x tp x pp x cp itself"
        )
    if resolved.config.cluster.backend == "local":
        LocalPlacement(resolved)


def open_placement(resolved: ResolvedRun) -> Placement:
    """Reserve all that the run needs. Raises UserError, with nothing started, where it is not available."""
    if resolved.config.cluster.backend == "local":
        return LocalPlacement(resolved)
    from megasharp.cluster.ray_runtime.session import RaySession, SessionSettings

    assert resolved.cluster_layout is not None
    settings, store = SessionSettings(gpus=None if resolved.cluster_layout.gpu else 0), ray_store_bytes(resolved.config)
    session = RaySession(replace(settings, object_store_bytes=max(store, settings.object_store_bytes)))
    try:
        slots = session.reserve(resolved.cluster_layout)
        small = small_stores(store, session.nodes())
        if small is not None:
            note(small)
        return RayPlacement(resolved, session, slots)
    except BaseException:
        session.close()
        raise
