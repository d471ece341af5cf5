"""Checkpoints of a run: written beside their place, renamed into it, verified when read, pruned by retention."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from megasharp.checkpoint.manifest import (
    CursorEntry,
    Manifest,
    describe_files,
    sha256,
)
from megasharp.convert.record import software_versions
from megasharp.errors import UserError, disk_is_full, one_line
from megasharp.files import flush, write_text
from megasharp.prolonged.control import ControlState

MANIFEST = "manifest.json"
LATEST = "latest"


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


class CheckpointStore:
    """The folder `checkpoints/` of a run. The `keep_last` newest stay, every `keep_every`-th step, and step `best`."""

    def __init__(self, folder: Path, keep_last: int, keep_every: int | None) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.best: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `write` fills an empty folder, the manifest follows, then the folder gets its name.

        Raises UserError in one line when the disk is full; the partial folder is removed.
        """
        final = self._folder / f"step_{state.step:06d}"
        partial = self._folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            write(partial)
            self._complete(partial, state)
            if final.exists():
                # Only a checkpoint of a step that is being repeated after a failed resume can stand here.
                shutil.rmtree(final)
            partial.rename(final)
            flush(self._folder)
            write_text(self._folder / LATEST, final.name + "\n")
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if disk_is_full(error):
                newest = str(max(self.steps(), default="none"))
                raise UserError(
                    f"{final}: no space left on the disk, this checkpoint was not written; newest complete step: "
                    f"{newest}; free space and continue with --resume"
                ) from error
            raise
        self._prune()
        return final

    def _complete(self, partial: Path, state: RunState) -> None:
        manifest = Manifest(
            step=state.step,
            policy_version=state.policy_version,
            memory_version=state.memory_version,
            cursor=CursorEntry(epoch=state.cursor_epoch, position=state.cursor_position),
            pending=[CursorEntry(epoch=epoch, position=position) for epoch, position in state.pending],
            reference=state.reference,
            skipped_in_a_row=state.skipped_in_a_row,
            control=state.control,
            files=describe_files(partial),
            software=software_versions(),
        )
        for name in manifest.files:
            flush(partial / name)
        write_text(partial / MANIFEST, manifest.model_dump_json(indent=1))

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        names = (path.parent.name.removeprefix("step_") for path in self._folder.glob(f"step_*/{MANIFEST}"))
        # A copy that someone made beside it has another kind of name.
        return sorted(int(name) for name in names if name.isdecimal())

    def newest(self, damaged: Callable[[str], None] | None = None) -> tuple[Path, RunState] | None:
        """The newest checkpoint whose files are all there and unchanged, or None when there is no checkpoint.

        `damaged` is told what is wrong with each newer one that is passed over.
        Raises UserError when checkpoints exist but none can be trusted.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            folder = self._folder / f"step_{step:06d}"
            problem = self.problem(folder)
            if problem is None:
                return folder, read_state(folder)
            problems.append(problem)
            if damaged is not None:
                damaged(problem)
        if problems:
            raise UserError(f"{self._folder}: no complete checkpoint: {problems[0]}")
        return None

    @staticmethod
    def problem(folder: Path) -> str | None:
        """What is wrong with a checkpoint, or None: the manifest reads, and every file has its size and hash."""
        try:
            manifest = _read_manifest(folder)
        except UserError as error:
            return str(error)
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != entry.size or sha256(path) != entry.sha256:
                return f"{path} differs from what was saved"
        return None

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._keep_last :])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        for step in set(steps) - kept - {self.best}:
            folder = self._folder / f"step_{step:06d}"
            # Without its manifest it no longer exists, even if the removal is interrupted.
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: not a complete checkpoint: {one_line(error)}") from error
    except ValidationError as error:
        raise UserError(f"{folder / MANIFEST}: not a manifest this version reads: {one_line(error)}") from error


def read_state(folder: Path) -> RunState:
    """The run state of a complete checkpoint. Raises UserError for anything else."""
    manifest = _read_manifest(folder)
    return RunState(
        step=manifest.step,
        policy_version=manifest.policy_version,
        memory_version=manifest.memory_version,
        cursor_epoch=manifest.cursor.epoch,
        cursor_position=manifest.cursor.position,
        reference=manifest.reference,
        skipped_in_a_row=manifest.skipped_in_a_row,
        control=manifest.control,
        pending=tuple((entry.epoch, entry.position) for entry in manifest.pending),
    )
