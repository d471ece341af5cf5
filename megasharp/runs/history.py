"""What a run's folder tells of it, whatever state it is in: going on, finished, killed, or made by an older version."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.attempts import AttemptRecord, read_attempts
from megasharp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megasharp.checkpoint.run_folder import stored_config
from megasharp.config.core import Tree
from megasharp.errors import UserError
from megasharp.metrics.writers import Row, read_metrics

_TIME = "time/"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint's step, size in bytes, when it was completed (seconds since 1970), and what is wrong with it.

    Hashes are not computed here: a file that is there with its size counts as whole until a resume reads it.
    """

    step: int
    size: int
    written: float
    problem: str | None
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run as its folder has it at `now`. `attempts` are by number, None for those of versions without records."""

    folder: Path
    config: Tree
    rows: Sequence[Row]
    attempts: dict[int, AttemptRecord | None]
    checkpoints: Sequence[CheckpointEntry]
    alive: bool
    now: float

    @property
    def name(self) -> str:
        """The run's name, as its configuration has it."""
        return str(self.config.get("name", self.folder.name))

    @property
    def steps(self) -> int | None:
        """How many steps the run is to have."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def token_budget(self) -> int | None:
        """How many response tokens the run is to have; None: its steps alone end it."""
        budget = self.config.get("token_budget")
        return budget if isinstance(budget, int) else None

    @property
    def tokens(self) -> int:
        """The response tokens of the steps in the history."""
        return int(sum(row.get("rollout/tokens") or 0.0 for row in self.training))

    @property
    def complete(self) -> bool:
        """Whether the last step of all is in the history."""
        by_tokens = self.token_budget is not None and self.tokens >= self.token_budget
        return by_tokens or (self.steps is not None and self.last_step >= self.steps)

    @property
    def training(self) -> list[Row]:
        """The rows of training steps, each step once, in order: a step that was trained again counts as it was last."""
        by_step = {row["step"] or 0: row for row in self.rows if row.get("time/step") is not None}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def stages(self) -> dict[int, dict[str, float]]:
        """Seconds by stage of each step, with the evaluation and the save that came after it, in the order of steps.

        Step 0 is the evaluation before the first. In runs of older versions both are the next step's.
        """
        found: dict[int, dict[str, float]] = {}
        for row in self.rows:
            seconds = {
                name.removeprefix(_TIME): value for name, value in row.items() if name.startswith(_TIME) and value
            }
            if not seconds:
                continue
            step = int(row["step"] or 0)
            if seconds.pop(_STEP, None) is not None:
                # A step that was trained again counts as it was last.
                found.pop(step, None)
            of_step = found.setdefault(step, {})
            for stage, value in seconds.items():
                of_step[stage] = of_step.get(stage, 0.0) + value
        return dict(sorted(found.items()))

    @property
    def last_step(self) -> int:
        """The last step of the history; 0 before the first."""
        return max((int(row["step"] or 0) for row in self.training), default=0)

    def series(self, name: str) -> list[tuple[int, float]]:
        """A figure's (step, value) in the order of steps, nulls left out; of several in one step the last."""
        found = {int(row["step"] or 0): value for row in self.rows if (value := row.get(name)) is not None}
        return sorted(found.items())

    @property
    def state(self) -> str:
        """In a few words: running, finished, or how the last attempt ended."""
        last = list(self.attempts.values())[-1] if self.attempts else None
        if self.alive:
            return "running"
        # The row of the last step is there before its checkpoint and the evaluation at the end.
        if self.complete and (last is None or last.exit_code == 0):
            return "finished"
        if last is None:
            return "not running" if self.rows else "never trained a step"
        if last.ended is None:
            return "killed"
        return f"stopped: {last.reason}"


def read_run(folder: Path, now: Callable[[], float] = time.time) -> RunHistory:
    """Read a run's folder. Raises UserError in one line for a folder that is no run."""
    config = stored_config(folder)
    rows = read_metrics(folder)
    return RunHistory(
        folder=folder,
        config=config,
        rows=rows,
        attempts=_with_rows(read_attempts(folder / "logs"), rows),
        checkpoints=read_checkpoints(folder / "checkpoints"),
        alive=is_alive(folder),
        now=now(),
    )


def _with_rows(attempts: dict[int, AttemptRecord | None], rows: Sequence[Row]) -> dict[int, AttemptRecord | None]:
    """The records; of the last one, where it has no end, with the rows that were written after it.

    A record is some seconds older than the newest row. What earlier attempts wrote beyond theirs is not in the rows.
    """
    number = max(attempts, default=0)
    record = attempts.get(number)
    if record is None or record.ended is not None:
        return attempts
    trained = [row for row in rows if row.get("time/step") is not None and (row["step"] or 0) > record.from_step]
    own = [row for row in trained if (row.get("time") or 0.0) >= record.started]
    if not own:
        return attempts
    steps = [int(row["step"] or 0) for row in own]
    newer = {
        "seen": max(record.seen, own[-1]["time"] or 0.0),
        "first_step": steps[0] if record.first_step is None else record.first_step,
        "last_step": steps[-1],
    }
    return {**attempts, number: record.model_copy(update=newer)}


def is_alive(folder: Path) -> bool:
    """Whether a process holds the run: the lock is only looked at, and given back at once.

    Where the file system has no locks no run can be started, so none is going on.
    """
    try:
        with (folder / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """All checkpoints by step, those that are not complete with their problem."""
    found = {}
    for path in folder.glob("step_*"):
        name = path.name.removeprefix("step_")
        if name.isdecimal():
            found[int(name)] = _entry(int(name), path)
    return [found[step] for step in sorted(found)]


def _entry(step: int, folder: Path) -> CheckpointEntry:
    try:
        written = (folder / MANIFEST).stat().st_mtime
        manifest = read_manifest(folder)
    except OSError:
        return CheckpointEntry(step, 0, 0.0, "it has no manifest", None)
    except UserError:
        return CheckpointEntry(step, 0, 0.0, "its manifest is damaged", None)
    size = sum(entry.size for entry in manifest.files.values())
    broken = next((name for name, entry in manifest.files.items() if _size(folder / name) != entry.size), None)
    return CheckpointEntry(step, size, written, broken and f"{broken} is missing or has another size", manifest)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
