"""The manifest of a checkpoint, written last: a folder without one is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from megasharp.common.control import ControlState
from megasharp.common.errors import UserError, one_line
from megasharp.common.files import FileHash, write_text
from megasharp.common.formats import FORMATS, read_stamp
from megasharp.common.section import Section
from megasharp.config.core import Tree

MANIFEST = "manifest.json"
_DIGEST = "sha256"
# Hashing releases the interpreter's lock, and one core hashes 1 to 2 GB a second.
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
    """A position in the stream of prompts."""

    epoch: int
    position: int


class SourceEntry(Section):
    """A source of a mixture: the position of its next prompt, its share, what it is owed and has left of its block."""

    name: str
    epoch: int
    position: int
    share: float
    owed: float
    left: int


class Inputs(Section):
    """Digests of what a run reads and no checkpoint holds; empty where an older version did not record one.

    They are of its problems, its tokenizer with the tokens that end a response, the weights it began with, and by name
    the problems of its evaluations' suites. `commits` are those of what came from the hub, by its keys.
    """

    problems: str = ""
    tokenizer: str = ""
    weights: str = ""
    suites: dict[str, str] = {}
    commits: dict[str, str] = {}

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Only where there are some: releases that knew no hub read what they can continue.
        return {key: value for key, value in write(self).items() if key != "commits" or value}


class Manifest(Section):
    """One checkpoint. The file ends with the SHA-256 of all this.

    `policy_version` and `memory_version` are the engines' versions of these weights; `reference` names where the
    reference policy came from. `cursor` is the position in the stream of prompts, `pending` the prompts before it that
    no step trained on, and `sources` are positions in those of a mixture. `control` holds the run's decisions so far:
    resets, the stage of response lengths, the best evaluation. `inputs` tells whether a resumed run still reads what
    the run began with.
    `files` maps each file, relative to the checkpoint, to its size and hash; `software` holds versions.
    """

    step: int
    policy_version: int
    memory_version: int
    cursor: CursorEntry
    pending: list[CursorEntry]
    reference: str
    skipped_in_a_row: int
    control: ControlState
    inputs: Inputs
    files: dict[str, FileEntry]
    software: dict[str, str]
    sources: list[SourceEntry] = []

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Only of a mixture, which no release continues that knows none: it refuses the run's configuration first.
        return {key: value for key, value in write(self).items() if key != "sources" or value}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it with its digest. Raises UserError when the disk is full or cannot be written."""
    tree: Tree = {"format": FORMATS["checkpoint"], **json.loads(manifest.model_dump_json())}
    write_text(folder / MANIFEST, json.dumps({**tree, _DIGEST: _digest(tree)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises UserError where there is none, or where it is not as it was written: NewerFormat for a later release's.
    """
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_bytes())
        written = tree.pop(_DIGEST, None)
        is_first = written is None and "format" not in tree
        # Of every format, so that a damaged file is not taken for a later release's.
        if not is_first and written != _digest(tree):
            raise UserError(f"{path} differs from what was saved")
        read_stamp(path, "checkpoint", tree)
        tree.pop("format", None)
        if is_first:
            # Format 1 as it was until 7b3c5b4 (2026-11-22) has no digests of itself and of inputs; the first ones
            # (a2725ee, 2026-11-21) have no memory network, pending prompts or decisions of the run either.
            tree = {"memory_version": 0, "pending": [], "control": {}, "inputs": {}, **tree}
        return Manifest.model_validate_json(json.dumps(tree))
    except OSError as error:
        raise UserError(f"{folder}: not a complete checkpoint: {one_line(error)}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: not a manifest this version reads: {one_line(error)}") from error


def _digest(tree: Tree) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def describe_files(folder: Path, known: Mapping[Path, FileHash]) -> dict[str, FileEntry]:
    """Return size and hash of every file below `folder`; those in `known` are not read again."""
    # Files in `known` count also where they are not listed: a network file system's cache may not show yet what other
    # nodes have just written.
    listed = [path for path in folder.rglob("*") if path.is_file()]
    hashes = hash_files([path for path in listed if path not in known]) | dict(known)
    return {str(path.relative_to(folder)): FileEntry.of(hashes[path]) for path in sorted(hashes)}


def hash_files(paths: Sequence[Path]) -> dict[Path, FileHash]:
    """Return size and hash of each file, reading several at a time."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(paths, threads.map(FileHash.of, paths), strict=True))
