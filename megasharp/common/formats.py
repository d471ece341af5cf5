"""Format numbers of what megasharp stores, and the one rule by which it is read.

A file without `format` is format 1. One that is newer than this release reads is refused in one line. Each older one
has a reader, beside that of the newest. A number is raised by whoever changes what is written so that an older release
could not read it or would misread it, with a folder of that format in tests/stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megasharp import __version__
from megasharp.common.errors import UserError

Stored = Literal[
    "checkpoint", "conversion", "evaluation", "evaluation samples", "probe", "rollouts", "run", "unfinished rollouts"
]
# Of an evaluation's samples: nothing (once it is complete), all but their texts, texts too, or token ids too.
Keep = Literal["none", "answers", "texts", "tokens"]
# The newest format of each, which this release writes.
FORMATS: Mapping[Stored, int] = {
    "checkpoint": 2,
    "conversion": 2,
    "evaluation": 2,
    "evaluation samples": 3,
    "probe": 2,
    "rollouts": 2,
    "run": 2,
    "unfinished rollouts": 2,
}


class NewerFormat(UserError):
    """A stored file of a later release: nothing is wrong with it, so nothing older may be taken in its place."""


def stamp(kind: Stored) -> dict[str, int | str]:
    """Return what a JSON file of this kind begins with: its format, and the release that writes it."""
    return {"format": FORMATS[kind], "megasharp": __version__}


def table_stamp(kind: Stored) -> dict[str, str]:
    """Return what a Parquet file of this kind has in its schema's metadata."""
    return {key: str(value) for key, value in stamp(kind).items()}


def read_stamp(path: Path, kind: Stored, found: Mapping[str, object]) -> int:
    """Return the format of a file from its tree. Raises UserError for one that this release does not read."""
    number = found.get("format", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UserError(f"{path}: format {number!r} is no number of a format; restore the file")
    if number > FORMATS[kind]:
        software = found.get("software")
        writer = found.get("megasharp") or (software.get("megasharp") if isinstance(software, Mapping) else None)
        by = f", written by megasharp {writer}" if isinstance(writer, str) else ""
        raise NewerFormat(
            f"{path} has format {number} ({kind}){by}; this release ({__version__}) reads formats up to "
            f"{FORMATS[kind]}: use {'that release' if by else 'a newer release'}"
        )
    return number


def read_table_stamp(path: Path, kind: Stored, metadata: Mapping[bytes, bytes] | None) -> int:
    """Return the format of a Parquet file from its schema's metadata. Raises UserError as `read_stamp` does."""
    found = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in (metadata or {}).items()}
    number = found.get("format", "1")
    return read_stamp(path, kind, {**found, "format": int(number) if number.isdecimal() else number})
