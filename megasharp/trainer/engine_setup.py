"""The engines of a run and all that depends on their kind: rollouts, weight sync, turns on shared devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from megasharp.rollout.episodes.episode_engine import AsyncEpisodes, RoundEpisodes
from megasharp.rollout.in_flight import Unfinished
from megasharp.rollout.sglang.client.external import (
    ExternalEngine,
    WithExternal,
    check_served,
    join,
    own_identity,
)
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, Sleeper
from megasharp.rollout.step_request import Engine, PromptSource
from megasharp.tasks.judge import Judge
from megasharp.trainer.factories import (
    Learners,
    make_async_rollouts,
    make_engine,
    make_rollouts,
    recorded_routing,
)
from megasharp.trainer.loop import Phases, Rollouts, Sync
from megasharp.trainer.placement import Placement
from megasharp.trainer.rank_engines import EngineFolders, RankEngines
from megasharp.trainer.resolve.devices import device_of, sampling_device
from megasharp.trainer.resolve.engine_settings import (
    check_room,
    choose_transport,
    fleet_settings,
    group_variables,
    longest,
    ranks_beside,
)
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.weight_sync.colocation import Apart, Colocated, Offloadable
from megasharp.weight_sync.endpoints import InPlaceSync, InProcessSync, WeightSource
from megasharp.weight_sync.push import FleetSync, make_transport


class VersionedSync(Sync, Protocol):
    """A sync that also counts the memory network's versions."""

    @property
    def memory_version(self) -> int: ...


class Collector(Rollouts, Protocol):
    """Rollouts that know which prompts were taken and not trained yet, and continue those of an earlier process."""

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return the prompts that were taken and that no step has trained on, with their responses so far."""
        ...

    def take_up(self, source: PromptSource, prompts: Sequence[Unfinished]) -> int:
        """Continue these prompts of a checkpoint; returns how many fit no prompt of `source` and are dropped."""
        ...


class Serving(Protocol):
    """Running engines of one kind. Learners are built after them, while co-located engines sleep."""

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        ...

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Make the rollouts of training groups; `meanwhile` is called now and then while engines sample."""
        ...

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """Make the weight sync; the versions are those last pushed."""
        ...

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Make the turns on shared devices; the first is the learners'."""
        ...

    def go_on_with(self, policy: WeightSource, memory: WeightSource | None) -> None:
        """Let a step wait for an engine that restarts, and give it these weights, where no other is left.

        To be called once there are phases and a sync.
        """
        ...

    def close(self) -> None:
        """End the engines."""
        ...


class RoundByRound:
    """Engines in this run's own processes, which sample a round of prompts while the learner waits."""

    def __init__(self, resolved: ResolvedRun, engine: Engine, sync: Callable[[int, int], VersionedSync]) -> None:
        self._resolved = resolved
        self._engine = engine
        if resolved.has_episodes:
            self._engine = RoundEpisodes(engine, resolved.tokenizer, resolved.config.rollout.episodes)
        self._sync = sync

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._engine

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Sample round by round."""
        return make_rollouts(self._resolved, self._engine, judge)

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """Hand weights over without a transport."""
        return self._sync(version, memory_version)

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Leave both in this machine's memory, which holds them."""
        return Apart()

    def go_on_with(self, policy: WeightSource, memory: WeightSource | None) -> None:
        """Do nothing: these engines end with the run."""

    def close(self) -> None:
        """Sample no more."""
        self._engine.close()


def serve_in_process(resolved: ResolvedRun) -> RoundByRound:
    """Make the engine in this process."""
    memory, window = (resolved.memory.model.description, resolved.memory.window) if resolved.memory else (None, None)
    device = sampling_device(device_of(resolved.config))
    records = recorded_routing(resolved) is not None
    engine = make_engine(resolved.model.description, torch.float32, device, memory, window, records)
    return RoundByRound(resolved, engine, partial(InProcessSync, engine))


def serve_in_ranks(resolved: ResolvedRun, learners: Learners) -> RoundByRound:
    """Make an engine in each of the policy's ranks."""
    memory = resolved.memory
    folders = EngineFolders(
        # Ranks may run in another folder.
        resolved.model.description.absolute(),
        memory.model.description.absolute() if memory else None,
        memory.window if memory else None,
        recorded_routing(resolved) is not None,
    )
    engines = RankEngines(learners.policy, learners.memory, resolved.layout.dp, folders)
    return RoundByRound(resolved, engines, partial(InPlaceSync, engines))


class FleetServing:
    """SGLang engines in processes of their own."""

    def __init__(
        self,
        resolved: ResolvedRun,
        placement: Placement,
        folder: Path,
        logs: Path,
        say: Callable[[str], None],
        external_key: str,
    ) -> None:
        config = resolved.config
        memory, window = (resolved.memory.model, resolved.memory.window) if resolved.memory else (None, None)
        settings = fleet_settings(config, resolved.model, memory, logs, window)
        settings = replace(settings, variables=group_variables(config))
        self._resolved = resolved
        self._placement = placement
        self._folder = folder
        self._turns: Apart | Colocated = Apart()
        self._sync: FleetSync | None = None
        starter = placement.starter(settings) if config.rollout.restarts else None
        urls = config.rollout.external
        self._external: list[ExternalEngine] = []
        if urls:
            wanted = own_identity(settings)
            # First of all: what is refused is refused before anything is loaded.
            self._external = join(urls, config.rollout.engines, external_key, wanted)
            starter = WithExternal(starter, self._external, wanted, say)
        options = FleetOptions(room=longest(config), external=len(urls))
        engines = [*placement.engines(settings), *self._external]
        self._fleet = Fleet(engines, settings, options, tell=say, starter=starter)
        self._engine: Fleet | AsyncEpisodes = self._fleet
        if resolved.has_episodes:
            self._engine = AsyncEpisodes(self._fleet, resolved.tokenizer, config.rollout.episodes)
        self._sleeper = Sleeper(self._fleet.members, self._fleet.settle) if settings.sleep else None
        try:
            check_room(config, self._fleet.prompt_limit)
            if self._sleeper is not None:
                self._sleeper.sleep()
        except BaseException:
            self._engine.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._engine

    def rollouts(self, judge: Judge, meanwhile: Callable[[], None]) -> Collector:
        """Collect groups as they become complete."""

        def look_after() -> None:
            meanwhile()
            self._engine.tend()

        return make_async_rollouts(self._resolved, self._engine, judge, look_after)

    def sync(self, version: int, memory_version: int) -> VersionedSync:
        """Push weights by the configured transport."""
        config = self._resolved.config
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
        self._sync = FleetSync(self._fleet, made, version, memory_version)
        return self._sync

    def phases(self, learners: Sequence[Offloadable]) -> Phases:
        """Take turns where devices are shared."""
        if self._sleeper is not None:
            self._turns = Colocated(learners, self._sleeper)
        return self._turns

    def go_on_with(self, policy: WeightSource, memory: WeightSource | None) -> None:
        """Push again in the middle of a step: the learners' weights move after it only."""
        turns, sync = self._turns, self._sync
        assert sync is not None
        check_served(self._external, sync.version + 1)

        def push_again() -> None:
            turns.handover()
            sync.push_again(policy, memory)
            turns.sampling()

        self._fleet.push_again_with(push_again, turns.lent)

    def close(self) -> None:
        """End the engines."""
        self._engine.close()


def open_serving(
    resolved: ResolvedRun,
    placement: Placement,
    folder: Path,
    logs: Path,
    say: Callable[[str], None],
    external_key: str,
) -> Serving:
    """Start the engines that the run in `folder` asks for, and join those started by hand.

    Raises UserError when they do not start, or cannot be used.
    """
    if resolved.config.rollout.engine == "inprocess":
        return serve_in_process(resolved)
    return FleetServing(resolved, placement, folder, logs, say, external_key)
