"""Engines that somebody started by hand elsewhere: a run joins them by their addresses, and leaves them running.

Such an engine is compared with what the run would have started (`rollout.sglang.identity`) before it is used. One that
is lost is asked again every few seconds; when it answers and is the same it takes part in the next push like one that
restarted. Its key is in the driver's environment only.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from megasharp.common.errors import UserError
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed
from megasharp.rollout.sglang.client.launch import EngineHandle, FleetSettings
from megasharp.rollout.sglang.client.members import Starter, Starting
from megasharp.rollout.sglang.identity import KEY_VARIABLE, VARIABLES, difference, identity

_ANSWER_S = 10.0
_AGAIN_S = 2.0
_REFUSED = ("status 401", "status 403")
# Tells this process's weights from another run's.
_OWNER = uuid.uuid4().hex[:12]


def address_of(url: str) -> tuple[str, int]:
    """Split http://host:port. Raises UserError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme == "https":
        raise UserError(f"rollout.external: {url}: engines speak no TLS; use http through a tunnel, such as ssh -L")
    if parts.scheme != "http" or not parts.hostname or not port or not plain:
        raise UserError(f"rollout.external: {url} is no address of an engine; write http://host:port")
    return parts.hostname, port


def on_this_machine(url: str) -> bool:
    """Return True for an address of the loopback interface."""
    host, _ = address_of(url)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def take_key() -> str:
    """Return the key of engines started by hand, and remove it from the environment, which reward code inherits.

    Raises UserError where there is none.
    """
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise UserError(
            f"rollout.external needs the engines' key in the environment variable {KEY_VARIABLE}; "
            "set it to the one with which they were started"
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{KEY_VARIABLE} may have printable ASCII characters only; start engines and run with such a key"
        )
    return key


class ExternalEngine:
    """An engine that others started; satisfies `EngineHandle`. The run neither sees nor ends its process."""

    def __init__(self, index: int, url: str, key: str, owner: str = _OWNER) -> None:
        self.index = index
        self.url = url
        self.api = EngineApi(*address_of(url), key, owner)
        self._left = False

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"engine {self.index} at {self.url}"

    @property
    def log(self) -> str:
        """Where its output is, in words."""
        return "its own output there"

    def exit_reason(self) -> str | None:
        """None as long as the run has it: its process is not seen."""
        return "the run has left it" if self._left else None

    def tail(self) -> str:
        """Empty: its log is elsewhere."""
        return ""

    def ask_to_end(self) -> None:
        """Leave it."""
        self._left = True

    def kill(self) -> None:
        """Leave it."""
        self._left = True


def own_identity(settings: FleetSettings) -> dict[str, Any]:
    """Describe the engines that a run starts, as `identity` has it. Raises UserError for an unreadable model."""
    try:
        said = identity(
            model=settings.model,
            memory=settings.memory,
            memory_window=settings.memory_window,
            device=settings.device,
            dtype=settings.dtype,
            tp=settings.rollout.tp,
            deterministic=settings.deterministic,
            returns_experts=settings.returns_experts,
        )
        return {**said, VARIABLES: dict(settings.variables)}
    except (OSError, ValueError) as error:
        raise UserError(f"{settings.model}: its config.json cannot be read: {error}") from error


def fault(engine: ExternalEngine, wanted: dict[str, Any]) -> str | None:
    """Say why a run cannot use this engine, or None; what an earlier run left open in it is closed."""
    api, there = engine.api, f"rollout.external: {engine.url}"
    # First of all: one that was lost in a push, or that a killed run left in one, is paused and answers no probe.
    for close in (api.end_update, api.proceed):
        with suppress(EngineFailed):
            close(_ANSWER_S)
    try:
        if not api.healthy(_ANSWER_S):
            return f"{there} is not ready"
        found = api.identity(_ANSWER_S)
    except EngineFailed as error:
        if str(error).startswith(_REFUSED):
            return f"{there} refuses the key of {KEY_VARIABLE}; start it and the run with the same one"
        return f"{there} does not answer ({error}); start the engine there, or correct the address"
    if found is None:
        return f"{there} is no engine of megasharp; start it by `python -m megasharp.rollout.sglang.engine CONFIG`"
    what = difference(found, wanted)
    if what is not None:
        return f"{there}: {what}"
    return None


def join(urls: Sequence[str], first: int, key: str, wanted: dict[str, Any]) -> list[ExternalEngine]:
    """Join engines, which get numbers from `first` on. Raises UserError for the first that cannot be used."""
    engines = [ExternalEngine(first + number, url, key) for number, url in enumerate(urls)]
    for engine in engines:
        problem = fault(engine, wanted)
        if problem is not None:
            raise UserError(problem)
    return engines


def check_served(engines: Sequence[ExternalEngine], version: int) -> None:
    """Raise UserError for an engine that holds weights of a later version than the one that is pushed next."""
    for engine in engines:
        served = engine.api.label().version
        if served > version:
            raise UserError(
                f"rollout.external: {engine.url} holds weights of version {served}, and the run pushes {version} next: "
                "it served another run, or this one after its checkpoint; start the engine again"
            )


class WithExternal:
    """Starts a run's own engines by `own`, and asks those started by hand again; satisfies `Starter`.

    `tell` gets a line for each new reason why one that answers cannot be used.
    """

    def __init__(
        self,
        own: Starter | None,
        engines: Sequence[ExternalEngine],
        wanted: dict[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self._own = own
        self._engines = {engine.index: engine for engine in engines}
        self._wanted = wanted
        self._tell = tell

    def begin(self, index: int, cache: int | None = None) -> Starting:
        """Start engine `index`, or ask for it until it answers."""
        known = self._engines.get(index)
        if known is not None:
            return Rejoining(ExternalEngine(index, known.url, known.api.key), self._wanted, self._tell)
        assert self._own is not None, "only engines that restart are begun"
        return self._own.begin(index, cache)


class Rejoining:
    """An engine started by hand that does not answer; satisfies `Starting`. A thread asks for it."""

    def __init__(self, engine: ExternalEngine, wanted: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._wanted = wanted
        self._tell = tell
        self._there = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name=f"ask for {engine.name}", daemon=True).start()

    def answered(self) -> EngineHandle | None:
        """Return the engine once it answers and is the one that was lost; None before."""
        return self._engine if self._there.is_set() else None

    def abandon(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _ask(self) -> None:
        told = ""
        while not self._ended.wait(_AGAIN_S):
            problem = fault(self._engine, self._wanted)
            if problem is None:
                self._there.set()
                return
            if "does not answer" not in problem and problem != told and not self._ended.is_set():
                told = problem
                self._tell(f"{self._engine.name} is not let in: {problem}")
