"""An engine as its fleet sees it, wherever its process runs and whoever started it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megasharp.serving.client.api import EngineApi


class EngineHandle(Protocol):
    """One running engine: its API, its log and its process."""

    @property
    def index(self) -> int:
        """Its number in the fleet."""
        ...

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def api(self) -> EngineApi:
        """How it is spoken to."""
        ...

    @property
    def log(self) -> Path:
        """Where its output goes, on its own machine."""
        ...

    def exit_reason(self) -> str | None:
        """How its process ended; None while it runs."""
        ...

    def tail(self) -> str:
        """The log's last lines on one line."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to end in good order; returns at once."""
        ...

    def kill(self) -> None:
        """End it and everything that it started, by force; harmless when it is gone."""
        ...
