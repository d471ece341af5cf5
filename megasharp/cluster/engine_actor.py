"""What runs in an engine's actor: it starts the engine's process on its node, watches it and stops it.

It has one thread, and keeps it: the engine's process is tied to the thread that started it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from megasharp.errors import UserError, one_line
from megasharp.serving.client.launch import (
    EngineProcess,
    FleetSettings,
    HeldPort,
    check_python,
    start_failure,
    start_one,
    start_problem,
    why_not_started,
)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's process runs; it will listen on `port` of its node's address."""

    port: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Why the process could not be made."""

    text: str


class EngineActor:
    """One engine on this node, whose address in the cluster is `address`."""

    def __init__(self, settings: FleetSettings, index: int, address: str, key: str) -> None:
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
            port = self._stack.enter_context(HeldPort(self._address)).number
            self._engine = start_one(self._settings, self._index, port, self._key, self._address)
        except (OSError, UserError) as error:
            return NotStarted(one_line(error))
        return Started(port)

    def problem(self, late: str | None, alone: bool = False) -> str | None:
        """The message for an engine that cannot start, or that has to be given up (`late` says why); None otherwise.

        `alone`: other engines run meanwhile, and go on.
        """
        ended = start_problem(self._process) or late
        if ended is None:
            return None
        if alone:
            return why_not_started(self._process, ended)
        return start_failure(self._process, self._settings.engines, ended)

    def settled(self) -> None:
        """The engine answers: its config file and the hold on its port are no longer needed."""
        self._process.settled()
        self._stack.close()

    def exit_reason(self) -> str | None:
        """How the process ended; None while it runs."""
        return self._process.exit_reason()

    def tail(self) -> str:
        """The log's last lines on one line."""
        return self._process.tail()

    def ask_to_end(self) -> None:
        """SIGTERM to the engine."""
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
