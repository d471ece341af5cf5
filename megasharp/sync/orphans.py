"""Folders that a push writes: named after their process, so that those of killed trainers can be removed."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

_PREFIX = "megasharp-weights-"


def new_folder(parent: Path) -> Path:
    """The path of a folder for one push; it does not exist yet."""
    return parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"


def remove_orphans(parent: Path) -> None:
    """Remove what trainers left that were killed in a push: in /dev/shm it takes memory until the machine restarts."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
