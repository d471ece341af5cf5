"""Output files that appear under their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasharp.errors import UserError, one_line


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
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write this file ({one_line(error)}); free space or mend the folder") from error
    finally:
        temporary.unlink(missing_ok=True)
