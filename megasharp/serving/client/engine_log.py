"""What one engine process has written: engines that come one after the other under a number share its log file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

_LINES = 8
_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class EngineLog:
    """The part of the file `path` from byte `begin` to byte `stop`, None: to its end."""

    path: Path
    begin: int = 0
    stop: int | None = None

    @classmethod
    def from_now_on(cls, path: Path) -> EngineLog:
        """Of a process that is yet to start."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def until_now(self) -> EngineLog:
        """Of a process that has ended: what the file gets from now on is another's."""
        return self if self.stop is not None or not self.path.exists() else replace(self, stop=self.path.stat().st_size)

    def end(self) -> str:
        """The last 16 KiB; empty where there is nothing to read."""
        try:
            with self.path.open("rb") as file:
                stop = file.seek(0, os.SEEK_END) if self.stop is None else self.stop
                begin = file.seek(max(self.begin, stop - _BYTES))
                return file.read(max(0, stop - begin)).decode("utf-8", "replace")
        except OSError:
            return ""

    def tail(self, lines: int = _LINES) -> str:
        """The last lines that are not empty, on one line, separated by bars."""
        # A traceback's lines of carets say nothing on one line.
        found = [" ".join(line.split()) for line in self.end().splitlines() if line.strip(" ^~\t")]
        return " | ".join(found[-lines:]) or "(the log is empty)"
