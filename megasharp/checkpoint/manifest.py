"""What a checkpoint says of itself: written last, so that a checkpoint without a manifest does not exist."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megasharp.config.core import Section
from megasharp.files import FileHash
from megasharp.prolonged.control import ControlState

MANIFEST = "manifest.json"
# Hashing lets go of the interpreter, and one core reads 1 to 2 GB a second.
_THREADS = min(16, os.cpu_count() or 1)


class FileEntry(Section):
    """One file of the checkpoint: its size in bytes and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, found: FileHash) -> FileEntry:
        """The entry of a file."""
        return cls(size=found.size, sha256=found.sha256)


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


def describe_files(folder: Path, known: Mapping[Path, FileHash]) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder`; of those in `known` they need not be found again.

    Files in `known` count also where they are not listed: a network file system's cache lacks for a while what other
    nodes have just made.
    """
    listed = [path for path in folder.rglob("*") if path.is_file()]
    hashes = hash_files([path for path in listed if path not in known]) | dict(known)
    return {str(path.relative_to(folder)): FileEntry.of(hashes[path]) for path in sorted(hashes)}


def hash_files(paths: Sequence[Path]) -> dict[Path, FileHash]:
    """Size and hash of each file, several at a time."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(paths, threads.map(FileHash.of, paths), strict=True))
