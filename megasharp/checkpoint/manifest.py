"""What a checkpoint says of itself: written last, so that a checkpoint without a manifest does not exist."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megasharp.config.core import Section
from megasharp.prolonged.control import ControlState


class FileEntry(Section):
    """One file of the checkpoint: its size in bytes and its SHA-256."""

    size: int
    sha256: str


class CursorEntry(Section):
    """A place of the data stream."""

    epoch: int
    position: int


class Manifest(Section):
    """One checkpoint.

    `policy_version` and `memory_version` are the engines' versions of these weights; `reference` names where the
    reference policy came from;
    `cursor` is where the data stream stood, `pending` the prompts before it that no step trained on.
    `control` is what the run decided so far: resets, the stage of response lengths, the best evaluation.
    `files` maps each file, relative to the checkpoint, to its size and hash; `software` holds versions.
    """

    step: int
    policy_version: int
    memory_version: int = 0
    cursor: CursorEntry
    pending: list[CursorEntry] = []
    reference: str
    skipped_in_a_row: int
    control: ControlState = ControlState()
    files: dict[str, FileEntry]
    software: dict[str, str]


def describe_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder`."""
    return {
        str(path.relative_to(folder)): FileEntry(size=path.stat().st_size, sha256=sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
