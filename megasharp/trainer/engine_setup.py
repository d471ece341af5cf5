"""The engines of a run and all that depends on their kind: rollouts, weight sync, whose turn it is on the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megasharp.rollout.in_flight import Unfinished
from megasharp.rollout.sglang.client.fleet import Fleet, Sleeper
from megasharp.rollout.step_request import Engine, PromptSource
from megasharp.tasks.judge import Judge
from megasharp.trainer.factories import make_async_rollouts, make_engine, make_rollouts
from megasharp.trainer.loop import Phases, Rollouts, Sync
from megasharp.trainer.placement import Placement
from megasharp.trainer.resolve.devices import device_of, sampling_device
from megasharp.trainer.resolve.engine_settings import check_room, choose_transport, fleet_settings, ranks_beside
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.weight_sync.colocation import Apart, Colocated, Offloadable
from megasharp.weight_sync.endpoints import InProcessSync
from megasharp.weight_sync.push import FleetSync, make_transport


class VersionedSync(Sync, Protocol):
    """A sync that counts the memory network's versions too."""

    @property
    def memory_version(self) -> int: ...


class Collector(Rollouts, Protocol):
    """Rollouts that know which prompts were taken and not trained yet, and go on with those of an earlier process."""

    def unfinished(self) -> tuple[Unfinished, ...]: ...

    def take_up(self, source: PromptSource, prompts: Sequence[Unfinished]) -> int: ...


class Serving(Protocol):
    """One kind of engines, running. The learners are built after it: co-located engines sleep while that happens."""

    @property
    def engine(self) -> Engine:
        """What samples."""
        ...

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Sampling and verification of training groups; `meanwhile` is called now and then while others sample."""
        ...

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """The way of the weights; the versions are those last pushed."""
        ...

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Whose turn it is on the devices; begins with the learners'."""
        ...

    def close(self) -> None:
        """End the engines."""
        ...


class InProcessServing:
    """The engine in this process."""

    def __init__(self, checked: ResolvedRun) -> None:
        self._checked = checked
        memory = checked.memory.model.description if checked.memory else None
        device = sampling_device(device_of(checked.config))
        self._engine = make_engine(checked.model.description, torch.float32, device, memory)

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self._engine

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Round by round, sampled by this process itself."""
        return make_rollouts(self._checked, self._engine, judge)

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """Handed over in this process."""
        return InProcessSync(self._engine, version, memory_version)

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Engine and learner share this machine's memory."""
        return Apart()

    def close(self) -> None:
        """Free the engine's weights."""
        self._engine.close()


class FleetServing:
    """SGLang engines in processes of their own."""

    def __init__(
        self, checked: ResolvedRun, placement: Placement, folder: Path, logs: Path, say: Callable[[str], None]
    ) -> None:
        config = checked.config
        memory = checked.memory.model if checked.memory else None
        settings = fleet_settings(config, checked.model, memory, logs)
        self._checked = checked
        self._placement = placement
        self._folder = folder
        # One that begins on a GPU whose memory the learner has would take it, or fail for want of it.
        again = config.rollout.restarts > 0 and not (settings.sleep and settings.device != "cpu")
        starter = placement.starter(settings) if again else None
        self._fleet = Fleet(placement.engines(settings), settings, tell=say, starter=starter)
        self._sleeper = Sleeper(self._fleet.members) if settings.sleep else None
        try:
            check_room(config, self._fleet.prompt_limit)
            if self._sleeper is not None:
                self._sleeper.sleep()
        except BaseException:
            self._fleet.close()
            raise

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self._fleet

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Groups as they become complete."""
        return make_async_rollouts(self._checked, self._fleet, judge, meanwhile)

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """By the configured transport."""
        config = self._checked.config
        transport = choose_transport(config, "sync")
        assert transport != "inprocess", "engines of their own were asked for"
        made = make_transport(
            self._fleet,
            transport,
            config.sync,
            folder=self._folder / "weights" if transport == "disk" else None,
            host=self._placement.address,
            beside=ranks_beside(config) or (),
        )
        return FleetSync(self._fleet, made, version, memory_version)

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Turns where devices are shared."""
        return Apart() if self._sleeper is None else Colocated(learners, self._sleeper)

    def close(self) -> None:
        """End the engines."""
        self._fleet.close()


def open_serving(
    checked: ResolvedRun, placement: Placement, folder: Path, logs: Path, say: Callable[[str], None]
) -> Serving:
    """Start the engines that the run in `folder` asks for. Raises UserError when they do not start."""
    if checked.config.rollout.engine == "inprocess":
        return InProcessServing(checked)
    return FleetServing(checked, placement, folder, logs, say)
