"""Engines on the nodes of a Ray cluster: a thin actor starts and watches each; the driver speaks HTTP to the engine.

An actor starts its engine's process on its node, watches it and stops it. It has one thread, and keeps it: the engine's
process is tied to the thread that started it. An engine ends with its actor, and so with its slots, with the driver and
with Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megasharp.cluster.ray_runtime.process_environment import interface_of, usable
from megasharp.cluster.ray_runtime.slots import Slots, end_actors
from megasharp.common.errors import RunFailed, UserError, one_line
from megasharp.common.files import write_below
from megasharp.common.group_environment import adapters, keep_to
from megasharp.common.parent_death import end_with_parent
from megasharp.rollout.sglang.client.api import EngineApi
from megasharp.rollout.sglang.client.launch import (
    GLANCE_S,
    EngineProcess,
    FleetSettings,
    HeldPort,
    answers,
    check_python,
    new_key,
    start_error,
    start_failure,
    start_one,
    start_problem,
    stop,
    why_not_started,
    with_cache,
)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's process runs; it will listen on `port` of its node's address."""

    port: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The reason why the process could not be started."""

    text: str


class EngineActor:
    """One engine on this node, whose address in the cluster is `address`."""

    def __init__(self, settings: FleetSettings, index: int, address: str, key: str) -> None:
        # Ray looks for the raylet by a timer of the wall clock: where that was set back an hour, actors and with them
        # engines outlive it for an hour.
        end_with_parent(os.getppid())
        self._settings = settings
        self._index = index
        self._address = address
        self._key = key
        self._stack = ExitStack()
        self._engine: EngineProcess | None = None

    def start(self) -> Started | NotStarted:
        """Choose a port and start the process; it answers later."""
        try:
            check_python(self._settings)
            write_below(self._settings.log_folder)
            # The engine inherits it, and meets the ranks there.
            keep_to(interface_of(self._address), adapters())
            port = self._stack.enter_context(HeldPort(self._address)).number
            self._engine = start_one(self._settings, self._index, port, self._key, self._address)
        except (OSError, UserError) as error:
            return NotStarted(one_line(error))
        return Started(port)

    def problem(self, late: str | None, alone: bool = False) -> str | None:
        """Return the message for an engine that cannot start or is given up (`late` says why); None otherwise.

        `alone`: other engines run meanwhile, and go on.
        """
        ended = start_problem(self._process) or late
        if ended is None:
            return None
        if alone:
            return why_not_started(self._process, ended)
        return start_failure(self._process, self._settings.rollout.engines, ended)

    def settled(self) -> None:
        """Remove the config file and the hold on the port, which an engine that answers does not need."""
        self._process.settled()
        self._stack.close()

    def exit_reason(self) -> str | None:
        """Return the reason why the process ended; None while it runs."""
        return self._process.exit_reason()

    def tail(self) -> str:
        """Return the log's last lines on one line."""
        return self._process.tail()

    def ask_to_end(self) -> None:
        """Send SIGTERM to the engine."""
        if self._engine is not None:
            self._engine.ask_to_end()

    def kill(self) -> str | None:
        """End the engine's whole process group, and say how its leader ended."""
        self._stack.close()
        if self._engine is None:
            return None
        self._engine.kill()
        return self._engine.exit_reason()

    @property
    def _process(self) -> EngineProcess:
        assert self._engine is not None, "the engine was not started"
        return self._engine


_POLL_S = 0.2
# An actor answers at once; one that does not is on a node in trouble.
_ANSWER_S = 10.0
_GONE = "its Ray actor, or its node, is gone"


class ClusterEngine:
    """An engine that an actor runs; satisfies `EngineHandle`. `log` is a path on the engine's node."""

    def __init__(self, index: int, api: EngineApi, log: Path, actor: Any) -> None:
        self.index = index
        self.api = api
        self.log = log
        self.actor = actor
        self._ended: str | None = None

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"engine {self.index}"

    def exit_reason(self) -> str | None:
        """Return the reason why its process ended; None while it runs, and while its node does not answer."""
        if self._ended is None:
            with suppress(GetTimeoutError):
                self._ended = self._ask("exit_reason", _GONE)
        return self._ended

    def tail(self) -> str:
        """Return the log's last lines on one line."""
        try:
            return self._ask("tail", f"(on {self.api.host}, which cannot be asked)") or ""
        except GetTimeoutError:
            return f"(on {self.api.host}, which does not answer)"

    def ask_to_end(self) -> None:
        """Send SIGTERM to the engine, by its actor; return at once."""
        if self._ended is None and usable():
            self.actor.ask_to_end.remote()

    def kill(self) -> None:
        """End the engine's process group, then its actor; harmless when they are gone."""
        ended: str | None = None
        with suppress(GetTimeoutError):
            # Even where its first process has ended: others of its group may not have.
            ended = self._ask("kill", _GONE)
        self._ended = self._ended or ended or "it was stopped"
        end_actors([self.actor])

    def _ask(self, method: str, gone: str) -> str | None:
        if not usable():
            return gone
        try:
            answer: str | None = ray.get(getattr(self.actor, method).remote(), timeout=_ANSWER_S)
        except RayActorError:
            return gone
        return answer


def launch_on_cluster(settings: FleetSettings, slots: Slots) -> list[ClusterEngine]:
    """Start all engines in their slots and wait until all answer.

    `settings.gpus` comes from the slots. Raises `start_error`, with all engines stopped, where one does not start.
    """
    settings, key = _placed(settings, slots), new_key()
    addresses = [_address(slots, index) for index in range(settings.rollout.engines)]
    actors = [_actor(slots, settings, index, key) for index in range(settings.rollout.engines)]
    try:
        engines = _started(actors, addresses, key, settings)
    except BaseException:
        end_actors(actors)
        raise
    try:
        _wait_for_all(engines, settings.start_limit_s)
    except BaseException:
        stop(engines)
        raise
    return engines


class ClusterStarter:
    """Starts single engines in their own slots; satisfies `Starter`."""

    def __init__(self, settings: FleetSettings, slots: Slots) -> None:
        self._settings = _placed(settings, slots)
        self._slots = slots

    def begin(self, index: int, cache: int | None = None) -> ClusterStarting:
        """Start the actor of engine `index`, which starts the engine, with a cache of `cache` tokens where it is given.

        Raises UserError where Ray refuses.
        """
        try:
            return ClusterStarting(with_cache(self._settings, cache), self._slots, index)
        except RayError as error:
            raise UserError(f"its Ray actor did not start: {one_line(error)}") from error


class ClusterStarting:
    """An engine of the cluster that does not answer yet; satisfies `Starting`."""

    def __init__(self, settings: FleetSettings, slots: Slots, index: int) -> None:
        self._settings = settings
        self._index = index
        self._address = _address(slots, index)
        self._key = new_key()
        self._deadline = time.monotonic() + settings.start_limit_s
        self._actor = _actor(slots, settings, index, self._key)
        self._port = self._actor.start.remote()
        self._engine: ClusterEngine | None = None

    def answered(self) -> ClusterEngine | None:
        """Return the engine once it answers; None before. Raises UserError where it will not."""
        late = f"no answer within {self._settings.start_limit_s:g} s" if time.monotonic() > self._deadline else None
        try:
            problem = self._progress(late)
        except RayError as error:
            problem = one_line(error)
        if problem is not None:
            self.abandon()
            raise UserError(problem)
        if self._engine is None or not answers(self._engine.api, GLANCE_S):
            return None
        self._engine.actor.settled.remote()
        return self._engine

    def abandon(self) -> None:
        """End its actor, and with it the engine."""
        if self._engine is not None:
            self._engine.kill()
        else:
            end_actors([self._actor])

    def _progress(self, late: str | None) -> str | None:
        """Note its port once the actor reports it; return why it will not start, if so."""
        if self._engine is not None:
            found: str | None = ray.get(self._actor.problem.remote(late, alone=True), timeout=_ANSWER_S)
            return found
        if not ray.wait([self._port], timeout=0)[0]:
            return late
        answer = ray.get(self._port)
        if isinstance(answer, NotStarted):
            return answer.text
        log = self._settings.log_folder / f"engine_{self._index}.log"
        self._engine = ClusterEngine(self._index, EngineApi(self._address, answer.port, self._key), log, self._actor)
        return None


def _placed(settings: FleetSettings, slots: Slots) -> FleetSettings:
    """Complete the settings for actors: the GPUs of the engines' slots, and absolute paths."""
    layout, seats = slots.layout, slots.seats
    assert layout.engines == settings.rollout.engines, "the layout was made for another number of engines"
    places = [layout.of_engine(index) for index in range(settings.rollout.engines)]
    gpus = [[gpu for slot in place if (gpu := seats[slot].gpu) is not None] for place in places]
    # Actors run in a folder of Ray's choice.
    return replace(
        settings,
        gpus=gpus if layout.gpu else (),
        python=settings.python.absolute(),
        model=settings.model.absolute(),
        memory=None if settings.memory is None else settings.memory.absolute(),
        log_folder=settings.log_folder.absolute(),
    )


def _address(slots: Slots, index: int) -> str:
    return slots.seats[slots.layout.of_engine(index)[0]].node


def _actor(slots: Slots, settings: FleetSettings, index: int, key: str) -> Any:
    return slots.actor(EngineActor, slots.layout.of_engine(index)[0], settings, index, _address(slots, index), key)


def _started(actors: Sequence[Any], addresses: Sequence[str], key: str, settings: FleetSettings) -> list[ClusterEngine]:
    """The engines' processes, which do not answer yet."""
    answered: list[Started | NotStarted]
    try:
        answered = ray.get([actor.start.remote() for actor in actors], timeout=settings.start_limit_s)
    except RayError as error:
        raise RunFailed(f"the engines' Ray actors did not start: {one_line(error)}") from error
    engines = []
    for index, (actor, address, answer) in enumerate(zip(actors, addresses, answered, strict=True)):
        if isinstance(answer, NotStarted):
            raise UserError(f"engine {index} of {settings.rollout.engines} did not start on {address}: {answer.text}")
        log = settings.log_folder / f"engine_{index}.log"
        engines.append(ClusterEngine(index, EngineApi(address, answer.port, key), log, actor))
    return engines


def _wait_for_all(engines: Sequence[ClusterEngine], limit: float) -> None:
    deadline = time.monotonic() + limit
    waiting = list(engines)
    while waiting:
        late = f"no answer within {limit:g} s" if time.monotonic() > deadline else None
        for engine in waiting:
            problem: str | None
            try:
                problem = ray.get(engine.actor.problem.remote(late), timeout=_ANSWER_S)
            except RayError:
                problem = f"{engine.name} did not start: {_GONE}; all engines are stopped; its log is {engine.log}"
            if problem is not None:
                raise start_error(problem)
        answered = [engine for engine in waiting if answers(engine.api)]
        for engine in answered:
            engine.actor.settled.remote()
        waiting = [engine for engine in waiting if engine not in answered]
        if waiting:
            time.sleep(_POLL_S)
