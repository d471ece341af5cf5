"""Single engines of this machine that begin while others run."""

from __future__ import annotations

import time
from contextlib import ExitStack

from megasharp.errors import UserError
from megasharp.serving.client.launch import (
    GLANCE_S,
    EngineProcess,
    FleetSettings,
    HeldPort,
    answers,
    new_key,
    start_one,
    start_problem,
    why_not_started,
)


class LocalStarter:
    """Starts single engines on this machine; satisfies `Starter`."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings

    def begin(self, index: int) -> LocalStarting:
        """Start engine `index`; it ends with the calling thread."""
        return LocalStarting(self._settings, index)


class LocalStarting:
    """An engine of this machine that does not answer yet; satisfies `Starting`."""

    def __init__(self, settings: FleetSettings, index: int) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + settings.start_limit_s
        with ExitStack() as stack:
            port = stack.enter_context(HeldPort())
            self._engine = start_one(settings, index, port.number, new_key())
            self._port = stack.pop_all()

    def answered(self) -> EngineProcess | None:
        """The engine once it answers."""
        problem = start_problem(self._engine)
        if problem is None and answers(self._engine.api, GLANCE_S):
            self._engine.settled()
            self._port.close()
            return self._engine
        if problem is None and time.monotonic() > self._deadline:
            problem = f"no answer within {self._settings.start_limit_s:g} s"
        if problem is not None:
            failure = why_not_started(self._engine, problem)
            self.abandon()
            raise UserError(failure)
        return None

    def abandon(self) -> None:
        """Kill it."""
        self._engine.kill()
        self._port.close()
