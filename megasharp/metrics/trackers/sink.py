"""What the process that follows a run and the tracker's own library have to do with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megasharp.config.core import Tree


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one step that a tracker has not got yet; `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Described:
    """What a tracker is told of a run once: the project it belongs to, its name, and its configuration.

    `folder` is the tracker's own, for files that its library wants to write.
    """

    project: str
    name: str
    folder: Path
    config: Tree


class Sink(Protocol):
    """A run in a tracker."""

    @property
    def id(self) -> str:
        """The run's id there."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in the order of their steps. May raise anything."""
        ...

    def close(self) -> None:
        """Send what is left; the run may go on later."""
        ...


class Open(Protocol):
    """Makes the run in a tracker, or goes on with the one of this id; only a new one is told the configuration."""

    def __call__(self, described: Described, known: str | None) -> Sink: ...
