"""Messages about files say once which file it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import completed, held


def test_a_path_that_the_message_names_is_not_repeated(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing", tmp_path / "other"
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", str(missing))
    assert reason_at(error, missing) == "No such file or directory"
    assert reason_at(error, other) == f"[Errno 2] No such file or directory: '{missing}'"
    assert reason_at(OSError(errno.ENOSPC, "No space left on device"), other) == "No space left on device"
    assert reason_at(ValueError("no\nJSON"), other) == "no JSON"


def test_the_other_path_of_an_error_is_kept(tmp_path: Path) -> None:
    moved, target = tmp_path / "moved", tmp_path / "target"
    error = OSError(errno.EXDEV, "Invalid cross-device link", str(moved), None, str(target))
    assert reason_at(error, moved) == f"Invalid cross-device link -> {target}"
    assert reason_at(error, moved, target) == "Invalid cross-device link"


@each_case(
    "error",
    [
        OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device"),
        OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"),
        OSError(errno.ENOSPC, "No space left on device", "a.parquet"),
    ],
)
def test_a_full_disk_is_the_same_from_every_writer(tmp_path: Path, error: OSError) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(UserError) as caught, completed(path):
        raise error
    said = f"{path}: cannot write this file (no space left on the disk); free space or repair the folder"
    assert str(caught.value) == said


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError) as caught, held(tmp_path, "busy"):
        pass
    assert str(caught.value) == f"{tmp_path}: cannot be written (Is a directory); repair it or name another folder"
