"""The file system of runs: mounts, room, and what our code relies on, each tried for real.

Locks (flock) keep a second process from a run, a rename replaces a file in one step, and fsync puts it on the disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megasharp.cluster.slurm.doctor.findings import Finding, Patient, size_text
from megasharp.common.errors import one_line
from megasharp.common.files import Scratch, flush

# The parts of a run's folder that a plan counts.
_PLANNED = ("checkpoints", "rollouts", "rollout_tokens", "metrics.jsonl", "tensorboard")
# Takes the lock of a file, as another process of the run would. Exit code 3: it is held.
_TAKE = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""
_HELD, _TAKE_S = 3, 60.0
NO_LOCKS = "mount it with locks (flock; Lustre: -o flock, NFS: a lock server), or set --runs to another"


def check_folders(patient: Patient) -> Iterator[Finding]:
    """Yield the findings of the folders that a run reads and writes, and of the disk."""
    yield mounts([folder for folder in patient.folders if not Path(folder).exists()])
    yield from patient.inputs
    if patient.run is not None:
        parent = existing(patient.run)
        free = shutil.disk_usage(parent).free
        yield disk_space(str(parent), free, patient.checkpoint, patient.whole, planned_bytes(patient.run))
    yield from (Finding("note", "time limits", text) for text in patient.limits)


def mounts(missing: Sequence[str]) -> Finding:
    """Check that the folders that the run names are seen from here, in a container too."""
    if missing:
        return Finding(
            "FAIL", "mounts", f"not seen here: {', '.join(missing)}; mount them into the container (submit --mount)"
        )
    return Finding("ok", "mounts", "every folder that the run file names is seen")


def disk_space(path: str, free: int, checkpoint: int, whole: int, there: int) -> Finding:
    """Check for room for two checkpoints (the newest stays until the next is complete), then for the whole run.

    Bytes: `whole` are predicted of the run at its end, of which `there` are written already.
    """
    needed, left = 2 * checkpoint, max(whole - there, 0)
    text = f"{path}: {size_text(free)} free, two checkpoints take {size_text(needed)}"
    if free < needed and there < needed:
        return Finding("FAIL", "disk", f"{text}; free space or set --runs")
    written = f", {size_text(there)} of them written" if there else ""
    text = f"{text}, the whole run about {size_text(whole)}{written}"
    if free < left:
        keys = "checkpoint.keep_last, keep_every and log.rollouts.keep_last say what stays (megasharp plan)"
        return Finding("warn", "disk", f"{text}: it would fill the disk; {keys}, or free space")
    return Finding("ok", "disk", text)


def planned_bytes(run: Path) -> int:
    """Return the size of what a run has written so far of that; 0 before it begins. Files may go meanwhile."""
    total = 0
    for part in _PLANNED:
        for path in (run / part, *(run / part).rglob("*")):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
    return total


def existing(path: Path) -> Path:
    """Return the nearest above that exists: the run's own folder may come later, but not below what is no folder."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def check_file_system(patient: Patient) -> Finding:
    """Try the file system where checkpoints go; between nodes, in their meeting folder."""
    place = patient.place.meeting or existing(patient.run or Path.cwd())
    try:
        with Scratch(".megasharp-canary-", place) as folder:
            return file_system(place, tried(folder))
    except OSError as error:
        return file_system(place, {"a file": one_line(error)})


def tried(folder: Path) -> dict[str, str]:
    """Try in an empty folder what runs do in theirs; return what failed, and how."""
    problems = {}
    trials: dict[str, Callable[[Path], str]] = {"a file": _write, "rename": _rename, "fsync": _fsync, "lock": _lock}
    for name, trial in trials.items():
        try:
            problem = trial(folder)
        except OSError as error:
            problem = one_line(error)
        if problem:
            problems[name] = problem
    return problems


def file_system(place: Path, problems: Mapping[str, str]) -> Finding:
    """Judge the file system of `place` by what failed there, and how."""
    remedies = {
        "a file": "repair it or set --runs",
        "rename": "files of a run would be lost or half; set --runs to another file system",
        "fsync": "a checkpoint that is complete could be lost; set --runs to another file system",
        "lock": f"two processes could run one run; {NO_LOCKS}",
    }
    for name, remedy in remedies.items():
        if name in problems:
            return Finding("FAIL", "file system", f"{place}: {name}: {problems[name]}; {remedy}")
    return Finding("ok", "file system", f"{place}: a file was written, read, locked, flushed and replaced by a rename")


def _write(folder: Path) -> str:
    (folder / "written").write_text("first")
    return "" if (folder / "written").read_text() == "first" else "it gave back something else than was written"


def _rename(folder: Path) -> str:
    target = folder / "replaced"
    target.write_text("before")
    with target.open() as reader:
        (folder / "new").write_text("after")
        (folder / "new").replace(target)
        if target.read_text() != "after":
            return "the old content is still there under the name"
        return "" if reader.read() == "before" else "who had the old file open reads another one"


def _fsync(folder: Path) -> str:
    (folder / "flushed").write_text("x")
    flush(folder / "flushed")
    flush(folder)
    return ""


def _lock(folder: Path) -> str:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "" if taken(folder / "lock") == "held" else "a second process got it too"


def taken(path: Path) -> str:
    """Try in another process to lock a file; return "held", "free", or why it cannot be tried."""
    command = [sys.executable, "-I", "-S", "-c", _TAKE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TAKE_S, check=False, cwd=os.sep)
    except subprocess.TimeoutExpired:
        return f"a lock was not answered in {_TAKE_S:.0f} s"
    if done.returncode == _HELD:
        return "held"
    return "free" if done.returncode == 0 else " ".join(done.stderr.strip().splitlines()[-1:])
