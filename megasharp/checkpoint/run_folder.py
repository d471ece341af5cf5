"""The folder of a run: made once, never overwritten, held by one process at a time.

Each start of a run is an attempt with its own folder of logs. What an attempt does again, and what stands in its way,
is moved to `superseded/attempt_K`, K being its number, and keeps its path there. Nothing that was recorded is deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megasharp.checkpoint.attempts import attempt_paths, read_attempts
from megasharp.checkpoint.recorded import CHECKPOINTS, CONFIG_FILE, TABLES, check_checkpoints, has_begun, of_later_steps
from megasharp.common.errors import UserError, one_line, reason_at, reason_unwritten
from megasharp.common.files import Readers, flush, free_name, set_aside, write_for, write_like, write_text
from megasharp.common.formats import read_stamp, stamp
from megasharp.config.core import Tree, parse_yaml
from megasharp.metrics.writers import METRICS_FILE

RUN_FILE = "run.json"
_GLANCE_S = 1.0
SUPERSEDED = "superseded"
_KEPT = frozenset({".lock", "logs", SUPERSEDED})
# Records of a run, and all that a beginning leaves: besides them, files that only its own processes read.
_RECORDED = ("evals", *TABLES, "tensorboard", "trackers", METRICS_FILE)
_OF_A_BEGINNING = frozenset({CONFIG_FILE, RUN_FILE, CHECKPOINTS, "weights", *_RECORDED})


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run; `attempt` counts starts, beginning at 1; `resumed` says that an earlier one is continued.

    `note` is what the user must know of how it was opened.
    """

    root: Path
    attempt: int
    resumed: bool
    lock: TextIO
    note: str | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / CHECKPOINTS

    @property
    def logs(self) -> Path:
        """This attempt's logs."""
        return self.root / "logs" / f"attempt_{self.attempt}"

    def evals(self, step: int) -> Path:
        """The folder of the evaluations after `step`."""
        return self.root / "evals" / f"step_{step:06d}"

    def store_config(self, resolved: str) -> None:
        """Make this the run's configuration, once all that was saved has been read under it."""
        write_text(self.root / CONFIG_FILE, resolved)

    @property
    def superseded(self) -> Path:
        """The place for what this attempt does again."""
        return self.root / SUPERSEDED / f"attempt_{self.attempt}"

    def supersede_steps(self, after: int) -> None:
        """Move evaluations, responses and probes of steps above `after`, which will be trained again."""
        for path in of_later_steps(self.root, after):
            set_aside(path, self.superseded / path.relative_to(self.root))

    def prune_superseded(self, keep: int) -> None:
        """Remove what attempts superseded, but for the newest `keep` that did."""
        for folder in [*attempt_paths(self.root / SUPERSEDED).values()][: -keep or None]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Release the lock, so that another process can open the run."""
        self.lock.close()


def holds_no_run(root: Path) -> bool:
    """Return whether there is no folder, or one with logs alone, as a job leaves it before the run begins."""
    if not root.exists():
        return True
    return root.is_dir() and {path.name for path in root.iterdir()} <= _KEPT and not has_begun(root)


def open_run(
    root: Path, resolved_config: str, *, resume: bool, start_over: bool = False, readers: Readers = "owner"
) -> RunFolder:
    """Make the folder of a new run, or open an existing one.

    What a run left in which no step was recorded is superseded; its logs stay, because messages point to them. The
    configuration is kept with each attempt's logs; an existing run's own stays until `RunFolder.store_config`.
    With `start_over` an existing run's whole folder gets another name first, and a new one takes its place. From
    here on this process writes for `readers`.

    Raises UserError for an existing run without either, for one whose checkpoints are missing, for one that another
    process holds or that a later release wrote, and for a full disk.
    """
    if root.is_symlink() and not root.exists():
        raise UserError(f"{root} is a link to {root.readlink()}, which is not there; mount it, or remove the link")
    note = None
    try:
        if not start_over:
            _refuse(root, resume)
        lock = _locked(root, readers)
        if start_over and not holds_no_run(root):
            note = f"the old run is now {_move_away(root)}"
            lock.close()
            lock = _locked(root, readers)
        # Again, under the lock: whoever held it a moment ago may have finished a step.
        note = _refuse(root, resume) or note
        begun = _begun(root)
        attempt = 1 + max(attempt_paths(root / "logs"), default=0)
        folder = RunFolder(root, attempt, resume and (attempt > 1 or has_begun(root)), lock, note)
        if not resume:
            _clear(folder)
        folder.logs.mkdir(parents=True)
        write_text(root / RUN_FILE, json.dumps({**stamp("run"), "begun": begun}, indent=1) + "\n")
        write_text(folder.logs / CONFIG_FILE, resolved_config)
        if not resume or not (root / CONFIG_FILE).exists():
            folder.store_config(resolved_config)
    except OSError as error:
        reason = reason_unwritten(error, root)
        raise UserError(f"{root}: cannot make the run folder: {reason}" + (f"; {note}" if note else "")) from error
    return folder


def _clear(folder: RunFolder) -> None:
    """Supersede what a run left that recorded no step, and remove what none but its processes read."""
    for path in folder.root.iterdir():
        if path.name in _RECORDED:
            for one in [path] if path.is_file() else [*path.iterdir()]:
                set_aside(one, folder.superseded / one.relative_to(folder.root))
        elif path.is_dir() and not path.is_symlink() and path.name not in _KEPT:
            shutil.rmtree(path)
        elif path.is_file() and path.name not in {*_KEPT, CONFIG_FILE, RUN_FILE}:
            path.unlink()


def _move_away(root: Path) -> Path:
    """Give a run's folder the name of its end; return it. Raises UserError for a folder that is no run."""
    if not (root / CONFIG_FILE).is_file() or not (any(root.glob("logs/attempt_*")) or (root / METRICS_FILE).is_file()):
        raise UserError(f"{root}: not a run folder, so --start-over leaves it alone; choose another name=")
    # Where the run's folder is a link, so that both runs stay on the file system that it leads to.
    link, root = root, root.resolve()
    place = free_name(root.with_name(f"{root.name}.before_{datetime.now():%Y-%m-%d_%H-%M-%S}"))
    root.rename(place)
    if link.is_symlink():
        root.mkdir(mode=0o700)
    flush(root.parent)
    return place


def write_like_run(*paths: Path) -> None:
    """Have this process write for the readers of the runs that these paths are in, if any."""
    for path in paths:
        around = (path.absolute(), *path.absolute().parents)
        run = next((each for each in around if (each / CONFIG_FILE).is_file() and (each / "logs").is_dir()), None)
        if run is not None:
            write_like(run)


def stored_config(root: Path) -> Tree:
    """Read the configuration that a run's folder holds.

    Raises UserError for a folder that is no run, or of a later release.
    """
    _begun(root)
    path = root / CONFIG_FILE
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{root}: not a run folder: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a run's configuration")
    return tree


def _begun(root: Path) -> float:
    """Return when a run was begun, in seconds since 1970; now where there is none yet.

    Raises UserError for a folder of a later release. Format 1 (a2725ee, 2026-11-21, to 255d13e, 2026-11-24) has no
    RUN_FILE; there it is the start of the first attempt.
    """
    path = root / RUN_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        read_stamp(path, "run", tree)
        return float(tree["begun"])
    except (FileNotFoundError, NotADirectoryError):
        starts = [record.started for record in read_attempts(root / "logs").values() if record is not None]
        return min(starts, default=time.time())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({reason_at(error, path)}); restore it, or remove it to have it anew"
        ) from error


def _locked(root: Path, readers: Readers) -> TextIO:
    """Make the folder if missing and lock it. Raises UserError where another process holds it."""
    while True:
        write_for(readers, root)
        # The file stays for ever: who removed it would let a second process lock another file of its name.
        lock = (root / ".lock").open("w")
        if not _take(lock):
            lock.close()
            raise UserError(f"{root}: another process is running this run")
        # A process that starts the run over moves the folder away with its lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (root / ".lock").stat()):
                return lock
        lock.close()


def _take(lock: TextIO) -> bool:
    """Lock the run; False where another process holds it.

    Commands that only look whether it is held lock it for a moment, so a short wait tells them from a run.
    """
    deadline = time.monotonic() + _GLANCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        except OSError as error:
            raise UserError(
                f"{lock.name}: the file system cannot lock files ({one_line(error)}), and without that two processes "
                "could run this run; choose another folder for runs, or mount it with locks (flock)"
            ) from error
        else:
            return True


def _refuse(root: Path, resume: bool) -> str | None:
    """Raise UserError where a run cannot be continued, or a new one would replace more than is left of a beginning.

    Return a line for the user where a run that is continued begins again.
    """
    if resume:
        return check_checkpoints(root)
    refuse_existing(root)
    return None


def refuse_existing(root: Path) -> None:
    """Raise UserError where a new run would replace more than is left of a beginning."""
    if holds_no_run(root):
        return
    names = {path.name for path in root.iterdir()}
    known = all(name in _KEPT | _OF_A_BEGINNING or name.endswith(".partial") for name in names)
    if not known or not any(root.glob("logs/attempt_*")) or has_begun(root):
        raise UserError(f"{root}: this run exists; continue it with --resume, or choose another name=")
