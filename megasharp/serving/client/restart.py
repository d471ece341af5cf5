"""Engines that were lost begin anew, beside the others; those that are lost again and again stay out (quarantine).

An engine that came back serves nothing before it holds the current weights: it is let in where a push of all of them
begins, takes part in that push, and is asked for its version like every other. What it was sampling when it was lost
went to the others long before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megasharp.errors import UserError, one_line
from megasharp.serving.client.api import EngineFailed
from megasharp.serving.client.handle import EngineHandle
from megasharp.serving.client.members import Members


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """An engine begins anew at most `most` times within `within_s` seconds; 0: never."""

    most: int = 0
    within_s: float = 3600.0


class Starting(Protocol):
    """An engine on its way."""

    def answered(self) -> EngineHandle | None:
        """The engine once it answers; returns within seconds. Raises UserError, with nothing left, where it won't."""
        ...

    def abandon(self) -> None:
        """End it."""
        ...


class Starter(Protocol):
    """Whoever starts engines: of this machine, or of a cluster."""

    def begin(self, index: int) -> Starting:
        """Start engine `index` and return at once. Raises UserError or OSError where that fails."""
        ...


class Restarts:
    """The engines of a fleet that are on their way back. `tell` gets a line for each turn."""

    def __init__(
        self, members: Members, starter: Starter, settings: RestartSettings, tell: Callable[[str], None]
    ) -> None:
        self._members = members
        self._starter = starter
        self._settings = settings
        self._tell = tell
        self._starting: dict[int, Starting] = {}
        self._begun: dict[int, list[float]] = {}
        self._out: set[int] = set()

    def look(self) -> None:
        """Let in the engines that answer, and begin those that were lost; waits for none.

        No weights may be on their way; always in one thread, with which these engines end.
        """
        for index, member in enumerate(self._members.all):
            if index in self._starting:
                self._let_in(index)
            elif not member.health.alive and index not in self._out:
                self._begin(index)

    def close(self) -> None:
        """End those that are on their way."""
        starting, self._starting = self._starting, {}
        for one in starting.values():
            one.abandon()

    def _begin(self, index: int) -> None:
        now = time.monotonic()
        begun = [then for then in self._begun.get(index, []) if now - then < self._settings.within_s]
        name = self._members.all[index].name
        if len(begun) >= self._settings.most:
            self._out.add(index)
            self._tell(
                f"{name} stays out: lost {len(begun) + 1} times within {self._settings.within_s / 60:g} minutes "
                f"(rollout.restarts is {self._settings.most})"
            )
            return
        self._begun[index] = [*begun, now]
        self._members.all[index].process.kill()
        try:
            self._starting[index] = self._starter.begin(index)
        except (UserError, OSError) as error:
            self._tell(f"{name} did not begin anew: {one_line(error)}")

    def _let_in(self, index: int) -> None:
        name = self._members.all[index].name
        try:
            engine = self._starting[index].answered()
        except UserError as error:
            del self._starting[index]
            self._tell(f"{name} did not begin anew: {one_line(error)}")
            return
        if engine is None:
            return
        del self._starting[index]
        try:
            if self._members.asleep:
                # As the others are while weights come: memory for weights, none for the cache.
                engine.api.flush()
                engine.api.release(("kv_cache",))
            self._members.replace(index, engine)
        except EngineFailed as error:
            engine.kill()
            self._tell(f"{name} did not begin anew: {one_line(error)}")
            return
        self._tell(f"{name} is back; it serves once it holds the weights that are pushed now")
