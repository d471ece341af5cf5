"""Messages about files say once which file it is."""

from __future__ import annotations

import errno
from pathlib import Path

from megasharp.common.errors import reason_at


def test_a_path_that_the_message_names_is_not_repeated(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing", tmp_path / "other"
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", str(missing))
    assert reason_at(error, missing) == "No such file or directory"
    assert reason_at(error, other) == f"[Errno 2] No such file or directory: '{missing}'"
    assert reason_at(OSError(errno.ENOSPC, "No space left on device"), other) == "No space left on device"
    assert reason_at(ValueError("no\nJSON"), other) == "no JSON"
