"""The folder of a run: made once, never overwritten, held by one process at a time."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megasharp.errors import UserError, disk_is_full, one_line
from megasharp.files import write_text


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run; `attempt` counts starts, beginning at 1; `created` says that this process made the folder."""

    root: Path
    attempt: int
    created: bool
    lock: TextIO

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """This attempt's logs."""
        return self.root / "logs" / f"attempt_{self.attempt}"

    def evals(self, step: int) -> Path:
        """Where the evaluations after `step` lie."""
        return self.root / "evals" / f"step_{step:06d}"

    def close(self) -> None:
        """Let another process have the run."""
        self.lock.close()


def open_run(root: Path, resolved_config: str, *, resume: bool) -> RunFolder:
    """Make the folder of a new run, or take up an existing one.

    Raises UserError for an existing run without `resume`, for one that another process holds, and for a full disk.
    """
    try:
        created = not root.exists()
        if not created and any(root.iterdir()) and not resume:
            raise UserError(f"{root}: this run exists; continue it with --resume, or choose another name=")
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(f"{root}: another process is running this run") from None
        attempt = 1 + len(list((root / "logs").glob("attempt_*")))
        folder = RunFolder(root, attempt, created, lock)
        folder.logs.mkdir(parents=True)
        write_text(root / "config.yaml", resolved_config)
    except OSError as error:
        reason = "no space left on the disk" if disk_is_full(error) else one_line(error)
        raise UserError(f"{root}: cannot make the run folder: {reason}") from error
    return folder
