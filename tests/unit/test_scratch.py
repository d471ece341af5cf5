"""Temporary folders go with their owner, at once or when the next one comes; a living owner's stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasharp.common import files
from megasharp.common.files import Scratch, parent_for_sockets, remove_abandoned

PREFIX = "megasharp-test-"


def beside(folder: Path) -> Path:
    """A semaphore as Python would name it."""
    path = folder.with_name(f"sem.{folder.name}-x1")
    path.touch()
    return path


def test_it_is_private_and_goes_with_what_carries_its_name(tmp_path: Path) -> None:
    stranger = beside(tmp_path / "other")
    with Scratch(PREFIX, tmp_path / "new") as folder:
        assert folder.parent == tmp_path / "new" and folder.name.startswith(PREFIX)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
        named = beside(folder)
    assert not folder.exists() and not named.exists()
    assert stranger.exists()


def test_closing_twice_leaves_another_owners_alone(tmp_path: Path) -> None:
    owner = Scratch(PREFIX, tmp_path)
    owner.close()
    owner.path.mkdir()
    owner.close()
    assert owner.path.exists()


OWNER = """
import subprocess, sys, time
from pathlib import Path
from megasharp.common.files import Scratch
made = Scratch(sys.argv[1], Path(sys.argv[2]))
subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(made.path, flush=True)
time.sleep(3600)
"""


def test_a_killed_owners_goes_with_the_next(tmp_path: Path) -> None:
    """Not while the owner lives, whatever process id stands for it; its children do not count."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, PREFIX, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            theirs = Path(owner.stdout.readline().strip())
            named = beside(theirs)
            remove_abandoned(PREFIX, tmp_path)
            assert theirs.exists() and named.exists()
        finally:
            owner.kill()
    remove_abandoned("megasharp-", tmp_path / "nowhere")
    with Scratch(PREFIX, tmp_path) as ours:
        assert not theirs.exists() and not named.exists()
        remove_abandoned(PREFIX, tmp_path)
        assert ours.exists()


def test_only_folders_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file, link = (tmp_path / f"{PREFIX}{files._here()}{kind}" for kind in ("folder__", "file____", "link____"))
    folder.mkdir()
    file.touch()
    link.symlink_to(tmp_path)
    uid = os.getuid()
    monkeypatch.setattr(files.os, "getuid", lambda: uid + 1)
    remove_abandoned(PREFIX, tmp_path)
    assert folder.exists()
    monkeypatch.undo()
    remove_abandoned(PREFIX, tmp_path)
    assert not folder.exists() and file.exists() and link.is_symlink()


def test_what_others_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder of such a name, and those of other machines, whose locks are not seen here."""
    notes = tmp_path / f"{PREFIX}notes"
    notes.mkdir()
    monkeypatch.setattr(files, "_BOOT", tmp_path / "boot")
    (tmp_path / "boot").write_text("there")
    there = Path(files.tempfile.mkdtemp(prefix=f"{PREFIX}{files._here()}", dir=tmp_path))
    (tmp_path / "boot").write_text("here")
    remove_abandoned(PREFIX, tmp_path)
    assert notes.exists() and there.exists()
    (tmp_path / "boot").write_text("there")
    remove_abandoned(PREFIX, tmp_path)
    assert notes.exists() and not there.exists()


def test_one_taken_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, taken = files.fcntl.flock, list[Path]()

    def after_another(descriptor: int, kind: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        lock(descriptor, kind)

    monkeypatch.setattr(files.fcntl, "flock", after_another)
    with Scratch(PREFIX, tmp_path) as folder:
        assert folder.exists() and folder != taken[0]


def test_sockets_get_a_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", "/var/tmp")
    assert parent_for_sockets() == Path("/var/tmp")
    monkeypatch.setattr(files.tempfile, "tempdir", f"/{'a' * 30}")
    assert parent_for_sockets() == Path("/tmp")
