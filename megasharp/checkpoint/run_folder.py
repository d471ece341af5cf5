"""The folder of a run: made once, never overwritten, held by one process at a time.

Each start of a run is an attempt with its own folder of logs. Its record `logs/attempt_K/attempt.json`, from which
goodput and restarts are counted, is written at the start, kept up to date while the attempt trains, and completed at
its end. A process that was killed leaves a record without an end, whose `seen` is when it was last known to be alive.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from megasharp.common import signals
from megasharp.common.errors import RankDied, StageTimeout, TrainingStopped, UserError, disk_is_full, one_line
from megasharp.common.files import Readers, write_for, write_like, write_text
from megasharp.common.formats import read_stamp, stamp
from megasharp.common.section import Section
from megasharp.config.core import Tree, parse_yaml
from megasharp.metrics.writers import METRICS_FILE, read_metrics

ATTEMPT_FILE = "attempt.json"
# Seconds between two writes of the record: each is flushed to the disk, and training must not wait for that.
_BETWEEN_RECORDS = 5.0


class AttemptRecord(Section):
    """One start of a run; times in seconds since 1970, `seconds` by stage as the run's clock names them.

    `from_step` is the step of the checkpoint it continued from (0: the beginning), `first_step` and `last_step` the
    steps it finished, null before the first. `ended`, `reason` and `exit_code` are null while an attempt runs, and
    stay so where it was killed. `gave_up`: the run ended itself, and would again.
    """

    started: float
    seen: float
    ended: float | None = None
    reason: str | None = None
    exit_code: int | None = None
    gave_up: bool = False
    from_step: int = 0
    first_step: int | None = None
    last_step: int | None = None
    seconds: dict[str, float] = {}
    host: str = ""
    pid: int = 0
    slurm_job_id: str | None = None
    slurm_restart_count: int | None = None


class AttemptLog:
    """Keeps the record of the attempt whose logs are in `folder`; a context manager, whose body is the attempt.

    `began` is when its command started, in seconds since 1970: imports and checks are the attempt's time too. A record
    that cannot be written is left out, because the run itself reports a full disk.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time, *, began: float | None = None) -> None:
        self._path = folder / ATTEMPT_FILE
        self._now = now
        self._written = now()
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        self.record = AttemptRecord(
            started=self._written if began is None else began,
            seen=self._written,
            host=socket.gethostname(),
            pid=os.getpid(),
            slurm_job_id=os.environ.get("SLURM_JOB_ID"),
            slurm_restart_count=int(restarts) if restarts.isdecimal() else None,
        )
        self._write()

    @property
    def age(self) -> float:
        """Seconds since the attempt's start."""
        return self._now() - self.record.started

    def resumed(self, step: int) -> None:
        """Record that the attempt continues after the checkpoint of `step`."""
        self._change(from_step=step)
        self._write()

    def finished(self, step: int, seconds: Mapping[str, float]) -> None:
        """Record that `step` is done; `seconds` by stage since the attempt's start."""
        first = step if self.record.first_step is None else self.record.first_step
        self._change(first_step=first, last_step=step, seconds=dict(seconds))
        if self.record.seen - self._written >= _BETWEEN_RECORDS:
            self._write()

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Record seconds by stage since the attempt's start, with those after the last step."""
        self._change(seconds=dict(seconds))
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Record that the attempt is over, by this error or by none."""
        reason, code = how_it_ended(error)
        gave_up = isinstance(error, TrainingStopped)
        self._change(ended=self._now(), reason=reason, exit_code=code, gave_up=gave_up)
        self._write()

    def _change(self, **values: object) -> None:
        self.record = self.record.model_copy(update={"seen": self._now(), **values})

    def _write(self) -> None:
        self._written = self.record.seen
        with suppress(UserError, OSError):
            write_text(self._path, self.record.model_dump_json(indent=1))


def how_it_ended(error: BaseException | None) -> tuple[str, int]:
    """Return the reason in a few words, and the exit code that the command has for it."""
    number = signals.arrived()
    if number is not None:
        return number.name, 128 + number
    error = signals.failure() or error
    if error is None:
        return "finished", 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return one_line(error), error.code
    if isinstance(error, UserError):
        return one_line(error), error.exit_code
    known = isinstance(error, TrainingStopped | RankDied | StageTimeout)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}", 1


def read_attempts(logs: Path) -> dict[int, AttemptRecord | None]:
    """Read the records below a run's `logs/` by the attempt's number, in order; None where none can be read."""
    folders = {path.name.removeprefix("attempt_"): path for path in logs.glob("attempt_*") if path.is_dir()}
    numbers = sorted(int(name) for name in folders if name.isdecimal())
    found: dict[int, AttemptRecord | None] = {}
    for number in numbers:
        found[number] = None
        with suppress(OSError, ValueError):
            text = (folders[str(number)] / ATTEMPT_FILE).read_text(encoding="utf-8")
            found[number] = AttemptRecord.model_validate_json(text)
    return found


def seconds_of_all(attempts: Mapping[int, AttemptRecord | None]) -> dict[str, float]:
    """Return a run's seconds by stage, as far as its attempts' records go."""
    total: Counter[str] = Counter()
    for record in attempts.values():
        total.update(record.seconds if record is not None else {})
    return dict(total)


CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
_GLANCE_S = 1.0
_KEPT = frozenset({".lock", "logs"})
# Folders of tables, of which each step has one.
_TABLES = ("rollouts", "rollout_tokens", "probe")
_OF_A_BEGINNING = frozenset(
    {
        CONFIG_FILE,
        RUN_FILE,
        "checkpoints",
        "evals",
        "rollouts",
        "rollout_tokens",
        "probe",
        "tensorboard",
        "trackers",
        "weights",
        METRICS_FILE,
    }
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run; `attempt` counts starts, beginning at 1; `resumed` says that an earlier one is continued."""

    root: Path
    attempt: int
    resumed: bool
    lock: TextIO

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

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

    def forget_steps(self, after: int) -> None:
        """Remove evaluations, responses and probes of steps above `after`, which will be trained again."""
        for folder in (self.root / "evals").glob("step_*"):
            if _step(folder) > after:
                shutil.rmtree(folder)
        for table in (path for name in _TABLES for path in self.root.glob(f"{name}/step_*.parquet")):
            if _step(table) > after:
                table.unlink()

    def close(self) -> None:
        """Release the lock, so that another process can open the run."""
        self.lock.close()


def has_begun(root: Path) -> bool:
    """Return whether a training step was recorded there: before that there is nothing to continue."""
    if not root.is_dir():
        return False
    trained = any((row["step"] or 0) > 0 for row in read_metrics(root))
    return trained or any(root.glob("checkpoints/step_*/manifest.json"))


def holds_no_run(root: Path) -> bool:
    """Return whether there is no folder, or one with logs alone, as a job leaves it before the run begins."""
    return not root.exists() or (root.is_dir() and {path.name for path in root.iterdir()} <= _KEPT)


def open_run(root: Path, resolved_config: str, *, resume: bool, readers: Readers = "owner") -> RunFolder:
    """Make the folder of a new run, or open an existing one.

    A folder in which no step was recorded is cleared; its logs stay, because messages point to them. The
    configuration is kept with each attempt's logs; an existing run's own stays until `RunFolder.store_config`. From
    here on this process writes for `readers`.
    Raises UserError for an existing run without `resume`, for one that another process holds or that a later release
    wrote, and for a full disk.
    """
    try:
        _refuse_existing(root, resume)
        write_for(readers, root)
        # The file stays for ever: who removed it would let a second process lock another file of its name.
        lock = (root / ".lock").open("w")
        if not _take(lock):
            lock.close()
            raise UserError(f"{root}: another process is running this run")
        # Again, under the lock: whoever held it a moment ago may have finished a step.
        _refuse_existing(root, resume)
        begun = _begun(root)
        if not resume:
            for path in root.iterdir():
                if path.is_dir() and not path.is_symlink() and path.name not in _KEPT:
                    shutil.rmtree(path)
                elif path.name not in _KEPT:
                    path.unlink()
        numbers = (path.name.removeprefix("attempt_") for path in root.glob("logs/attempt_*"))
        attempt = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        folder = RunFolder(root, attempt, resume and (attempt > 1 or has_begun(root)), lock)
        folder.logs.mkdir(parents=True)
        write_text(root / RUN_FILE, json.dumps({**stamp("run"), "begun": begun}, indent=1) + "\n")
        write_text(folder.logs / CONFIG_FILE, resolved_config)
        if not (root / CONFIG_FILE).exists():
            folder.store_config(resolved_config)
    except OSError as error:
        reason = "no space left on the disk" if disk_is_full(error) else one_line(error)
        raise UserError(f"{root}: cannot make the run folder: {reason}") from error
    return folder


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
            f"{path} cannot be read ({one_line(error)}); restore it, or remove it to have it anew"
        ) from error


def _step(path: Path) -> int:
    """Return the step in a file's name; -1 where it is not one of ours."""
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


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


def _refuse_existing(root: Path, resume: bool) -> None:
    """Raise UserError where a new run would overwrite more than a run of ours leaves before its first step."""
    if resume:
        return
    names = {path.name for path in root.iterdir()} if root.exists() else set()
    if names <= _KEPT:
        return
    known = all(name in _KEPT | _OF_A_BEGINNING or name.endswith(".partial") for name in names)
    if not known or not any(root.glob("logs/attempt_*")) or has_begun(root):
        raise UserError(f"{root}: this run exists; continue it with --resume, or choose another name=")
