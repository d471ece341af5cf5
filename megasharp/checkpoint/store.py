"""Checkpoints of a run: written beside their place, renamed into it, verified when read, pruned by retention.

One is written at a time, and training may go on meanwhile: `begin`, then `poll` until it is there. `latest` names a
complete checkpoint at every moment from the first one on.

What a checkpoint says of itself: written last, so that a checkpoint without a manifest does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from megasharp.common.control import ControlState
from megasharp.common.errors import RankDied, UserError, disk_is_full, one_line
from megasharp.common.files import FileHash, flush, write_text
from megasharp.common.section import Section
from megasharp.config.core import Tree
from megasharp.convert.record import software_versions

MANIFEST = "manifest.json"
_DIGEST = "sha256"
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


class Inputs(Section):
    """Digests of what a run reads and no checkpoint holds.

    Its problems, its tokenizer with what ends a response, the weights it began with, and by name the problems
    of its evaluations' suites.
    """

    problems: str = ""
    tokenizer: str = ""
    weights: str = ""
    suites: dict[str, str] = {}


class Manifest(Section):
    """One checkpoint. The file ends with the SHA-256 of all this.

    `policy_version` and `memory_version` are the engines' versions of these weights; `reference` names where the
    reference policy came from;
    `cursor` is where the data stream stood, `pending` the prompts before it that no step trained on.
    `control` is what the run decided so far: resets, the stage of response lengths, the best evaluation.
    `inputs` tells whether the run still reads what it began with.
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises UserError when the disk is full or cannot be written."""
    tree: Tree = json.loads(manifest.model_dump_json())
    write_text(folder / MANIFEST, json.dumps({**tree, _DIGEST: _digest(tree)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises UserError where there is none, or where it is not what was written."""
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_bytes())
        written = tree.pop(_DIGEST)
    except OSError as error:
        raise UserError(f"{folder}: not a complete checkpoint: {one_line(error)}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: not a manifest this version reads: {one_line(error)}") from error
    if written != _digest(tree):
        raise UserError(f"{path} differs from what was saved")
    try:
        return Manifest.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise UserError(f"{path}: not a manifest this version reads: {one_line(error)}") from error


def _digest(tree: Tree) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


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


LATEST = "latest"
_PARTIAL = ".partial"
_STEP = "step_"


@dataclass(frozen=True, slots=True)
class RunState:
    """What a resumed run needs besides the learner's own shards; the defaults are a run's beginning.

    `pending` are the (epoch, position) of prompts before the cursor that were not trained on; they come first again.
    """

    reference: str
    step: int = 0
    policy_version: int = 0
    memory_version: int = 0
    cursor_epoch: int = 0
    cursor_position: int = 0
    skipped_in_a_row: int = 0
    pending: tuple[tuple[int, int], ...] = ()
    control: ControlState = field(default_factory=ControlState)
    inputs: Inputs = field(default_factory=Inputs)


class Writing(Protocol):
    """A checkpoint's content on its way to the disk."""

    def is_written(self) -> bool:
        """Whether `finish` will not have to wait."""
        ...

    def finish(self) -> Mapping[Path, FileHash]:
        """Complete the content; returns the files whose hashes are known already."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    state: RunState
    final: Path
    partial: Path
    writing: Writing


class CheckpointStore:
    """The folder `checkpoints/` of a run. The `keep_last` newest stay, every `keep_every`-th step, and step `best`.

    Until the checkpoint of a new `best` is complete, that of the one before stays.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int | None) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.best: int | None = None
        self._best_there: int | None = None
        self._pending: _Pending | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, state: RunState, write: Callable[[Path], Writing]) -> None:
        """Begin a checkpoint, after one under way is finished: `write` begins to fill an empty folder.

        Raises UserError in one line when the disk is full or cannot be written; the partial folder is removed. That
        goes for `poll` and `finish` too.
        """
        self.finish()
        final = self._step(state.step)
        partial = self._partial(state.step)
        with self._removed_if_it_fails(final, partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._pending = _Pending(state, final, partial, write(partial))

    def poll(self) -> None:
        """Complete the checkpoint under way, if all of it is written."""
        if self._pending is not None and self._pending.writing.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way and complete it: manifest, then name, then `latest`; prune older ones."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._removed_if_it_fails(pending.final, pending.partial):
            _complete(pending.partial, pending.state, pending.writing.finish())
            pending.partial.rename(pending.final)
        try:
            flush(self._folder)
            write_text(self._folder / LATEST, pending.final.name + "\n")
        except (OSError, UserError) as error:
            raise UserError(
                f"{pending.final}: this checkpoint is complete, but {LATEST} does not name it: {one_line(error)}; "
                "mend the disk and continue with --resume"
            ) from error
        self._prune()

    def abandon(self) -> None:
        """Give up the checkpoint under way, if there is one: the run ends, and nobody completes it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            shutil.rmtree(pending.partial, ignore_errors=True)

    @contextmanager
    def _removed_if_it_fails(self, final: Path, partial: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            lost = f"this checkpoint was not written; newest complete step: {max(self.steps(), default='none')}"
            if disk_is_full(error) or isinstance(error, OSError):
                reason = "no space left on the disk" if disk_is_full(error) else one_line(error)
                raise UserError(f"{final}: {reason}; {lost}; mend the disk and continue with --resume") from error
            if isinstance(error, RankDied):
                raise RankDied(f"{error}; {final}: {lost}") from error
            raise

    def _step(self, step: int) -> Path:
        return self._folder / step_name(step)

    def _partial(self, step: int) -> Path:
        return self._folder / f".{self._step(step).name}{_PARTIAL}"

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        return complete_steps(self._folder)

    def newest(self, damaged: Callable[[str], None] | None = None) -> tuple[Path, RunState] | None:
        """The newest checkpoint whose files are all there and unchanged, or None when there is no checkpoint.

        `damaged` is told what is wrong with each newer one that is passed over.
        Raises UserError when checkpoints exist but none can be trusted.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            folder = self._step(step)
            problem = self.problem(folder)
            if problem is None:
                return folder, read_state(folder)
            problems.append(problem)
            if damaged is not None:
                damaged(problem)
        if problems:
            raise UserError(f"{self._folder}: no complete checkpoint: {'; '.join(problems)}")
        return None

    def take_up(self, damaged: Callable[[str], None]) -> tuple[Path, RunState] | None:
        """`newest`, for the run that goes on from there; only the process that holds the run may call it.

        Newer checkpoints, damaged ones, make way for those that will be written in their place: they are renamed, and
        `damaged` is told what is wrong with each and its new name. What a killed process was writing or removing goes.
        """
        for left in self._folder.glob(f".step_*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        problems: list[str] = []
        found = self.newest(problems.append)
        if found is None:
            return None
        folder, state = found
        newer = [step for step in self.steps() if step > state.step]
        if newer:
            write_text(self._folder / LATEST, folder.name + "\n")
        for step, problem in zip(reversed(newer), problems, strict=True):
            name = self._step(step).name
            aside = self._folder / f"damaged_{name}"
            shutil.rmtree(aside, ignore_errors=True)
            self._step(step).rename(aside)
            damaged(f"{problem}; {name} is now {aside.name} and stays until you remove it")
        return found

    @staticmethod
    def problem(folder: Path) -> str | None:
        """What is wrong with a checkpoint, or None: the manifest reads, and every file has its size and hash."""
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            return str(error)
        if folder.name.startswith(_STEP) and folder.name != step_name(manifest.step):
            return f"{folder / MANIFEST} is that of step {manifest.step}"
        entries = {folder / name: entry for name, entry in manifest.files.items()}
        for path in entries:
            if not path.is_file():
                return f"{path} is missing"
        differing = (path for path, entry in entries.items() if path.stat().st_size != entry.size)
        try:
            found = next(differing, None) or next(
                (path for path, now in hash_files([*entries]).items() if FileEntry.of(now) != entries[path]), None
            )
        except OSError as error:
            return f"{folder} cannot be read: {one_line(error)}"
        return f"{found} differs from what was saved" if found else None

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._keep_last :])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        if self.best in steps:
            self._best_there = self.best
        for step in set(steps) - kept - {self._best_there}:
            leaving = self._partial(step)
            # Under this name it no longer exists, and goes at the next start if the removal is interrupted. What cannot
            # be removed now is tried again after the next save.
            with suppress(OSError):
                self._step(step).rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)


def step_name(step: int) -> str:
    """The folder's name of the checkpoint after a step."""
    return f"{_STEP}{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of complete checkpoints in a run's `checkpoints/`, oldest first."""
    names = (path.parent.name.removeprefix(_STEP) for path in folder.glob(f"{_STEP}*/{MANIFEST}"))
    # A copy that someone made beside it has another kind of name.
    return sorted(int(name) for name in names if name.isdecimal())


def read_state(folder: Path) -> RunState:
    """The run state of a complete checkpoint. Raises UserError for anything else."""
    manifest = read_manifest(folder)
    return RunState(
        step=manifest.step,
        policy_version=manifest.policy_version,
        memory_version=manifest.memory_version,
        cursor_epoch=manifest.cursor.epoch,
        cursor_position=manifest.cursor.position,
        reference=manifest.reference,
        skipped_in_a_row=manifest.skipped_in_a_row,
        control=manifest.control,
        inputs=manifest.inputs,
        pending=tuple((entry.epoch, entry.position) for entry in manifest.pending),
    )


def _complete(folder: Path, state: RunState, known: Mapping[Path, FileHash]) -> None:
    """Everything to the disk, and the manifest last."""
    manifest = Manifest(
        step=state.step,
        policy_version=state.policy_version,
        memory_version=state.memory_version,
        cursor=CursorEntry(epoch=state.cursor_epoch, position=state.cursor_position),
        pending=[CursorEntry(epoch=epoch, position=position) for epoch, position in state.pending],
        reference=state.reference,
        skipped_in_a_row=state.skipped_in_a_row,
        control=state.control,
        inputs=state.inputs,
        files=describe_files(folder, known),
        software=software_versions(),
    )
    for path in folder.rglob("*"):
        flush(path)
    write_manifest(folder, manifest)
