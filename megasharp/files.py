"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasharp.errors import UserError, one_line


def flush(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        raise UserError(f"{path}: cannot write this file ({one_line(error)}); free space or mend the folder") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by `text` in one step, durably. Raises UserError as `completed` does."""
    with completed(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def private(path: str, flags: int) -> int:
    """Opener for files that this user alone may read."""
    return os.open(path, flags, 0o600)
