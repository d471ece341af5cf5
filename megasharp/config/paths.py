"""Where a path in a configuration leads: as written, from the working directory, or from the repository."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def find(path: str) -> Path:
    """The first of: the path as written (relative to the working directory), the same below the repository.

    A path that exists at neither place is returned as written, for the caller's own message.
    """
    written = Path(path).expanduser()
    below = REPOSITORY / written
    return below if not written.exists() and below.exists() else written
