"""Files and folders that appear under their final name only when they are complete, and temporary folders.

`completed`, `completed_folder` and `write_text` write beside the target and rename. `Scratch` is a temporary folder:
what a killed process left, the next one removes. The owner holds a lock on its folder, which the kernel drops however
the process ends. Process ids would not do, because containers share /tmp and /dev/shm without sharing processes. Other
machines do not see the lock, so a folder's name has four letters of the machine and its boot, and folders of others are
left alone. `set_aside` and `cut_off` take from a folder what is repeated, and lose nothing of it.

Who may read what a run writes is said by the mode of its folder. `write_for` sets it, and the umask, which all that the
process starts inherits; `write_like` is for processes that write there later.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasharp.common.errors import UserError, disk_is_full, reason_at, reason_unwritten

SHARED_MEMORY = Path("/dev/shm")
# The kernel takes paths of sockets of at most 107 bytes.
_LONGEST_PARENT = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The suffix that tempfile.mkdtemp appends.
_LETTERS = re.compile("[a-z0-9_]{8}")
# The suffix of a copy of what is about to be cut off.
_CUT = ".cut"


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
    """Return the folder of temporary files, or /tmp where its path is too long for sockets some folders below it."""
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
    """Return four letters for this machine and its present boot."""
    try:
        name = _BOOT.read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return hashlib.sha256(name).hexdigest()[:4]


def _locked(prefix: str, parent: Path) -> tuple[Path, int | None]:
    """Return a new folder and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}{_here()}", dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            # Another process took it for abandoned before it was locked.
            os.close(lock)


def _remove(path: Path) -> None:
    for beside in path.parent.glob(f"*{glob.escape(path.name)}?*"):
        with suppress(OSError):
            beside.unlink()
    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file's size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileHash:
        """Return the hash of a file, which is read in pieces."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(file.tell(), digest)


def flush(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Hold `folder`, which is made if missing, against other processes until the block ends.

    Raises UserError, with `busy` as its reason, where another process holds it, and where it cannot be written. A file
    system without locks keeps no process out.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({reason_unwritten(error, folder, path)}); repair it or name another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: {busy}") from error
        except OSError:
            pass
        yield


@contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the body writes there replaces `path` in one step, durably.

    The folder is made if missing. When the body raises, `path` stays as it was and the temporary file goes.

    Raises:
        UserError: the operating system refused (a full disk, a read-only folder).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise UserError(
            f"{path}: cannot write this file ({reason_unwritten(error, path, temporary)}); free space or repair the "
            "folder"
        ) from error
    finally:
        # Where a file stands in the folder's place, even this is refused.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def completed_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes this name, with all that is in it on disk, when the body succeeds.

    Otherwise it goes, and so do those that killed processes left for the same `path`.

    Raises:
        UserError: `path` exists, also if it appears in the meantime, or the operating system refused (a full disk, a
            read-only folder).
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} already exists: remove it or choose another folder")
    with folder_errors(path):
        scratch = Scratch(f".{path.name}.partial-", path.absolute().parent)
    try:
        yield scratch.path
        with folder_errors(path):
            # The temporary folder was made for its owner alone; it gets the mode of a new one.
            mask = os.umask(0)
            os.umask(mask)
            scratch.path.chmod(0o777 & ~mask | scratch.path.stat().st_mode & stat.S_ISGID)
            for inner in (*scratch.path.rglob("*"), scratch.path):
                flush(inner)
            try:
                scratch.path.rename(path)
            except OSError as error:
                if path.exists():
                    raise UserError(
                        f"{path} was made by another process in the meantime: it stays, this one goes"
                    ) from error
                raise
            flush(path.absolute().parent)
    finally:
        scratch.close()


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk while the folder `path` is written into one line for the user."""
    try:
        yield
    except Exception as error:
        if disk_is_full(error):
            raise UserError(f"no space left for {path}: free some and repeat ({reason_at(error, path)})") from error
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written: {reason_at(error, path)}") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by `text` in one step, durably. Raises UserError as `completed` does."""
    with completed(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def private(path: str, flags: int) -> int:
    """Open a file that this user alone may read; for `open(opener=...)`."""
    return os.open(path, flags, 0o600)


def free_name(path: Path) -> Path:
    """Return `path`, or its name with _2, _3 and so on where something has it, a dangling link too."""
    free, number = path, 2
    while os.path.lexists(free):
        free, number = path.with_name(f"{path.name}_{number}"), number + 1
    return free


def set_aside(path: Path, target: Path) -> None:
    """Move a file or a folder to `target`, which appears complete, also where a link leads to another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        partial = target.with_name(f".{target.name}.partial")
        shutil.move(path, partial)
        partial.rename(target)


def cut_off(path: Path, keep: int, target: Path, begins: bytes = b"") -> None:
    """Move what a file holds after its first `keep` bytes to the new file `target`, which begins with `begins`.

    A killed process leaves every byte in one of them, as soon as `settle_cuts` has looked at what is there.
    """
    partial = target.with_name(f".{target.name}.partial")
    copy = target.with_name(f".{target.name}.{keep}{_CUT}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b") as file:
        file.seek(keep)
        with partial.open("wb") as aside:
            aside.write(begins)
            shutil.copyfileobj(file, aside)
        flush(partial)
        partial.rename(copy)
        flush(target.parent)
        file.truncate(keep)
        os.fsync(file.fileno())
    copy.rename(target)


def settle_cuts(path: Path, folders: Iterable[Path]) -> None:
    """Bring to an end what `cut_off` of `path`, with a target of its name in one of `folders`, was killed in.

    Nothing may have been added to the file since. What was not cut yet stays where it is.
    """
    size = path.stat().st_size if path.exists() else 0
    for folder in folders:
        for left in folder.glob(f".{glob.escape(path.name)}.*"):
            keep = left.name.removeprefix(f".{path.name}.").removesuffix(_CUT)
            if left.name.endswith(_CUT) and keep.isdecimal() and size <= int(keep):
                left.rename(left.with_name(path.name))
            else:
                left.unlink()


# A run's readers besides root, by the value of `log.readable_by`.
Readers = Literal["owner", "group"]
UMASK: dict[Readers, int] = {"owner": 0o077, "group": 0o027}


def write_for(readers: Readers, folder: Path) -> None:
    """Have this process, and all that it starts, make files for `readers` alone.

    `folder` is made if missing, below parents of the usual mode, and gets the mode. What is in it keeps its own. For
    a group it is setgid: what is made in it belongs to its group, not to the user's first one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.umask(UMASK[readers])
    folder.mkdir(exist_ok=True)
    # The mode of a folder that another user lets this one write to is theirs.
    with suppress(PermissionError):
        folder.chmod(0o777 & ~UMASK[readers] | (stat.S_ISGID if readers == "group" else 0))


def write_like(*folders: Path) -> None:
    """Have this process, and all that it starts, make files that nobody may read who may not read these folders."""
    mask = os.umask(0o077)
    for folder in folders:
        mask |= ~folder.stat().st_mode & 0o077
    os.umask(mask)


def write_below(folder: Path) -> None:
    """Have this process write like `folder`, which is made for its owner alone where this node does not see it."""
    if not folder.is_dir():
        os.umask(UMASK["owner"])
        folder.mkdir(parents=True, exist_ok=True)
    write_like(folder)
