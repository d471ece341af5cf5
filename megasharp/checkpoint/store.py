"""Checkpoints of a run: written under another name, renamed when complete, verified when read, pruned by retention.

One is written at a time, and training may go on meanwhile: `begin`, then `poll` until it is complete. `latest` is
updated atomically, so from the first checkpoint on it always names a complete one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from megasharp.checkpoint.manifest import (
    MANIFEST,
    CursorEntry,
    FileEntry,
    Inputs,
    Manifest,
    SourceEntry,
    describe_files,
    hash_files,
    read_manifest,
    write_manifest,
)
from megasharp.checkpoint.recorded import LATEST, complete_steps
from megasharp.common.control import ControlState
from megasharp.common.errors import RankDied, UserError, disk_is_full, one_line, reason_at, reason_unwritten
from megasharp.common.files import FileHash, flush, free_name, write_text
from megasharp.common.formats import NewerFormat
from megasharp.convert.record import software_versions
from megasharp.tasks.shares import Account
from megasharp.tasks.stream import DataCursor, SourceState

_PARTIAL = ".partial"
_STEP = "step_"


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run besides the learner's own shards; the defaults are a run's beginning.

    `pending` are the (epoch, position) of prompts before the cursor that were not trained on; they come first again.
    `sources` is where each source of a mixture is; empty where there is one.
    """

    reference: str
    step: int = 0
    policy_version: int = 0
    memory_version: int = 0
    cursor_epoch: int = 0
    cursor_position: int = 0
    skipped_in_a_row: int = 0
    pending: tuple[tuple[int, int], ...] = ()
    sources: tuple[SourceState, ...] = ()
    control: ControlState = field(default_factory=ControlState)
    inputs: Inputs = field(default_factory=Inputs)


class Writing(Protocol):
    """A checkpoint's content on its way to the disk."""

    def is_written(self) -> bool:
        """Return whether `finish` will return without waiting."""
        ...

    def finish(self) -> Mapping[Path, FileHash]:
        """Complete the content; return the files whose hashes are known already."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    state: RunState
    final: Path
    partial: Path
    writing: Writing


class CheckpointStore:
    """The folder `checkpoints/` of a run. The `keep_last` newest stay, every `keep_every`-th step, and step `best`.

    Until the checkpoint of a new `best` is complete, that of the previous best stays. `on_complete` gets the step of
    each that is complete, before others are pruned.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int | None, on_complete: Callable[[int], object] = int
    ) -> None:
        self._folder = folder
        self._on_complete = on_complete
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.best: int | None = None
        self._best_there: int | None = None
        self._pending: _Pending | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, state: RunState, write: Callable[[Path], Writing]) -> None:
        """Begin a checkpoint: `write` begins to fill an empty folder. One that is under way is finished first.

        Raises UserError in one line when the disk is full or cannot be written; the partial folder is removed. The
        same holds for `poll` and `finish`.
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
        # In this order: a process killed in between leaves the checkpoint before, or this one complete.
        with self._removed_if_it_fails(pending.final, pending.partial):
            _complete(pending.partial, pending.state, pending.writing.finish())
            pending.partial.rename(pending.final)
        self._on_complete(pending.state.step)
        try:
            flush(self._folder)
            write_text(self._folder / LATEST, pending.final.name + "\n")
        except (OSError, UserError) as error:
            raise UserError(
                f"{pending.final}: this checkpoint is complete, but {LATEST} does not name it: {one_line(error)}; "
                "fix the disk and continue with --resume"
            ) from error
        self._prune()

    def abandon(self) -> None:
        """Remove the checkpoint under way, if there is one: the run ends, and nobody completes it."""
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
                reason = reason_unwritten(error, final)
                raise UserError(f"{final}: {reason}; {lost}; fix the disk and continue with --resume") from error
            if isinstance(error, RankDied):
                raise RankDied(f"{error}; {final}: {lost}") from error
            raise

    def _step(self, step: int) -> Path:
        return self._folder / step_name(step)

    def _partial(self, step: int) -> Path:
        return self._folder / f".{self._step(step).name}{_PARTIAL}"

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        return complete_steps(self._folder)

    @property
    def newest_complete(self) -> Path | None:
        """The folder of the newest complete checkpoint, whose files are not read."""
        return next((self._step(step) for step in reversed(self.steps())), None)

    def newest(self, damaged: Callable[[str], None] | None = None) -> tuple[Path, RunState] | None:
        """Return the newest checkpoint whose files are all there and unchanged, or None when there is no checkpoint.

        `damaged` gets the problem of each newer one that is passed over.
        Raises UserError when checkpoints exist but none can be trusted, or one was written by a later release.
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
            raise UserError(
                f"{self._folder}: no complete checkpoint: {'; '.join(problems)}; "
                "restore the files, or begin anew with --start-over, which moves the folder aside"
            )
        return None

    def take_up(self, damaged: Callable[[str], None]) -> tuple[Path, RunState] | None:
        """Return `newest` for the run that continues from there; only the process that holds the run may call it.

        Newer checkpoints, all of them damaged or incomplete, are renamed, because the run will write others in their
        place; `damaged` gets the problem of each and its new name. What a killed process was writing or removing is
        deleted.
        """
        for left in self._folder.glob(f".step_*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        problems: list[str] = []
        found = self.newest(problems.append)
        if found is None:
            return None
        folder, state = found
        named = (path for path in self._folder.glob(f"{_STEP}*") if path.name.removeprefix(_STEP).isdecimal())
        newer = sorted((path for path in named if int(path.name.removeprefix(_STEP)) > state.step), reverse=True)
        if newer:
            write_text(self._folder / LATEST, folder.name + "\n")
        # Their files, many gigabytes each, have been read once.
        known = dict(zip(reversed(self.steps()), problems, strict=False))
        for path in newer:
            problem = known.get(int(path.name.removeprefix(_STEP))) or self.problem(path)
            aside = free_name(path.with_name(f"damaged_{path.name}"))
            path.rename(aside)
            damaged(f"{problem}; {path.name} is now {aside.name} and stays until you remove it")
        return found

    @staticmethod
    def problem(folder: Path) -> str | None:
        """Return what is wrong with a checkpoint; None where its manifest and every file's size and hash are right.

        Raises NewerFormat for one of a later release.
        """
        try:
            manifest = read_manifest(folder)
        except NewerFormat:
            raise
        except UserError as error:
            return str(error)
        if folder.name.startswith(_STEP) and folder.name != step_name(manifest.step):
            return f"{folder / MANIFEST} is that of step {manifest.step}"
        entries = {folder / name: entry for name, entry in manifest.files.items()}
        for path in entries:
            if not path.is_file():
                return f"{path} is missing"
        # Sizes first: a file that was cut short is found without reading any.
        differing = (path for path, entry in entries.items() if path.stat().st_size != entry.size)
        try:
            found = next(differing, None) or next(
                (path for path, now in hash_files([*entries]).items() if FileEntry.of(now) != entries[path]), None
            )
        except OSError as error:
            return f"{folder} cannot be read: {reason_at(error, folder)}"
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
            # Renamed first: under this name it is no checkpoint any more, and the next start removes it if the removal
            # is interrupted. What cannot be removed now is tried again after the next save.
            with suppress(OSError):
                self._step(step).rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)


def step_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after a step."""
    return f"{_STEP}{step:06d}"


def read_state(folder: Path) -> RunState:
    """Read the run state of a complete checkpoint. Raises UserError for anything else."""
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
        sources=tuple(
            SourceState(each.name, DataCursor(each.epoch, each.position), Account(each.share, each.owed, each.left))
            for each in manifest.sources
        ),
    )


def _complete(folder: Path, state: RunState, known: Mapping[Path, FileHash]) -> None:
    """Flush everything to the disk, and write the manifest last."""
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
        sources=[SourceEntry(name=each.name, **asdict(each.cursor), **asdict(each.account)) for each in state.sources],
    )
    for path in folder.rglob("*"):
        flush(path)
    write_manifest(folder, manifest)
