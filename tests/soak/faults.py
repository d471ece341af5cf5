"""The faults of the soak: what is done to whom, drawn at random, one at a time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.store import step_name
from tests.faults.injector import flip_a_byte
from tests.soak import roles

# A process that stands still for so long was not noticed: the longest limit of a stage in these runs is 300 s.
UNNOTICED_S = 420.0
_HOUR_S = 3600


@dataclass
class Target:
    """A run as the faults see it: its folder, its disk, the file that shifts its clock, and where copies go.

    `tend` lets the run go on while a fault lasts, and is False once it has ended.
    """

    root: Path
    disk: Path
    clock: Path
    copies: Path
    draw: random.Random
    tend: Callable[[], bool]
    findings: list[str] = field(default_factory=list)

    def last(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        """Let the run go on for so long, or until it ends or `until` holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.tend() and not until():
            time.sleep(0.2)


def _killing(role: str) -> Callable[[Target], str | None]:
    def kill(target: Target) -> str | None:
        process = roles.pick(role, target.draw)
        if process is None:
            return None
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return None
        return f"process {process.pid}"

    return kill


def stop(target: Target) -> str | None:
    """SIGSTOP, for some seconds or until somebody ends the process."""
    role = target.draw.choice(("driver", "rank", "engine"))
    process = roles.pick(role, target.draw)
    seconds = target.draw.choice((target.draw.uniform(5, 20), UNNOTICED_S))
    if process is None or not _stopped(process):
        return None
    try:
        target.last(seconds, until=lambda: not _stands(process))
        if not _stands(process):
            return f"{role}, ended"
        if seconds == UNNOTICED_S:
            target.findings.append(f"a {role} that stood still for {seconds:g} s was not ended")
        return f"{role}, for {seconds:.0f} s"
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def _stopped(process: psutil.Process) -> bool:
    """Stop a process; a signal takes a while to arrive. False where it has gone."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        for _ in range(500):
            if _stands(process):
                return True
            time.sleep(0.01)
    return False


def _stands(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() == psutil.STATUS_STOPPED
    return False


def fill_disk(target: Target) -> str:
    """No byte is left on the run's disk, for some seconds; what the run frees meanwhile is taken too."""
    ballast = target.disk / "ballast"
    seconds = target.draw.uniform(3, 12)
    file = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        size, end = 1 << 20, time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                os.write(file, bytes(size))
            except OSError:
                size = 1 << 12
                time.sleep(0.05)
    finally:
        os.close(file)
        ballast.unlink()
    return f"for {seconds:.0f} s"


def jump_clock(target: Target) -> str:
    """An hour forward, or back where it has gone forward."""
    (now,) = struct.unpack("q", target.clock.read_bytes())
    shift_clock(target.clock, 0 if now else _HOUR_S)
    return "back" if now else "forward"


def shift_clock(file: Path, seconds: int) -> None:
    """Write the offset in place: processes have the file mapped."""
    with file.open("r+b" if file.exists() else "wb") as mapped:
        mapped.write(struct.pack("q", seconds))


def copy_run(target: Target) -> str | None:
    """Copy the run folder file by file, as `cp -r` does, while it is written to."""
    copy = target.copies / target.root.name
    shutil.rmtree(target.copies, ignore_errors=True)
    target.copies.mkdir(parents=True)
    for path in _walk(target.root):
        there = copy / path.relative_to(target.root)
        # Files come and go meanwhile.
        with suppress(FileNotFoundError):
            if path.is_symlink():
                there.symlink_to(path.readlink())
            elif path.is_dir():
                there.mkdir(exist_ok=True)
            elif path.is_file():
                shutil.copyfile(path, there)
    return "checked at the end"


def _walk(folder: Path) -> Iterator[Path]:
    yield folder
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            with suppress(FileNotFoundError):
                yield from _walk(path)
        else:
            yield path


def damage(target: Target) -> str | None:
    """A byte of the newest checkpoint is another one, and the run has to start again."""
    checkpoints = target.root / "checkpoints"
    driver, steps = roles.pick("driver", target.draw), complete_steps(checkpoints)
    # Of the only checkpoint nothing is left to go on from: then a run has to end.
    if driver is None or len(steps) < 2:
        return None
    try:
        files = [path for path in (checkpoints / step_name(steps[-1])).rglob("*") if path.is_file()]
        file = target.draw.choice(sorted(path for path in files if path.stat().st_size > 0))
        flip_a_byte(file)
        driver.kill()
    except (FileNotFoundError, IndexError, psutil.NoSuchProcess):
        # An older checkpoint goes when a newer one is complete.
        return None
    return f"{file.relative_to(target.root)}, then the driver is killed"


def lose_latest(target: Target) -> str | None:
    """`checkpoints/latest` is gone, and the run has to start again."""
    latest, driver = target.root / "checkpoints" / "latest", roles.pick("driver", target.draw)
    if driver is None or not latest.exists():
        return None
    latest.unlink()
    with suppress(psutil.NoSuchProcess):
        driver.kill()
    return "then the driver is killed"


FAULTS: dict[str, Callable[[Target], str | None]] = {
    **{f"{role} killed": _killing(role) for role in roles.NAMES},
    "SIGSTOP": stop,
    "disk full": fill_disk,
    "clock jumps": jump_clock,
    "folder copied": copy_run,
    "file damaged": damage,
    "latest lost": lose_latest,
}


def deck(kinds: list[str], draw: random.Random) -> Iterator[str]:
    """Draw kinds without end, each once before any comes again."""
    while True:
        yield from draw.sample(kinds, len(kinds))
