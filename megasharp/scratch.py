"""Temporary files that do not outlive their owner for long: what a killed process left, the next one removes.

The owner holds a lock on its folder, which ends with the process however that ends. Process ids would not do:
containers share /tmp and /dev/shm without sharing their processes. Locks of folders are not seen from other machines,
so names say on which one a folder was made, since which start of it; folders of others are left alone.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# The kernel takes paths of sockets of at most 107 bytes.
_LONGEST_PARENT = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# What tempfile.mkdtemp appends.
_LETTERS = re.compile("[a-z0-9_]{8}")


class Scratch:
    """A folder below `parent` (None: where temporary files go) for this user alone, named `prefix` and some letters.

    Where a library wants names instead of paths, files beside it that carry its name belong to it. Making one removes
    those of the same prefix whose owners are gone. A file system without locks keeps what a killed owner left.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(prefix, parent)
        self.path, self._lock = _locked(prefix, parent)

    def close(self) -> None:
        """Remove it; harmless when that has happened."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def parent_for_sockets() -> Path:
    """Where temporary files go, or /tmp where that path is too long for sockets some folders below it."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _LONGEST_PARENT else "/tmp")


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove this user's folders below `parent` whose owners are gone, and the files that carry their names."""
    prefix = f"{prefix}{_here()}"
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        if not _LETTERS.fullmatch(path.name.removeprefix(prefix)):
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except OSError:
            pass
        finally:
            os.close(lock)


def _here() -> str:
    """Four letters for this machine and its present start."""
    try:
        name = _BOOT.read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return hashlib.sha256(name).hexdigest()[:4]


def _locked(prefix: str, parent: Path) -> tuple[Path, int | None]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}{_here()}", dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            # Somebody took it for an abandoned one before it was locked.
            os.close(lock)


def _remove(path: Path) -> None:
    for beside in path.parent.glob(f"*{glob.escape(path.name)}?*"):
        with suppress(OSError):
            beside.unlink()
    shutil.rmtree(path, ignore_errors=True)
