"""`megasharp train --retries`: the same command in a child, again after failures. Imports nothing that takes long."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megasharp.command import note
from megasharp.config.core import apply_overrides, read_tree
from megasharp.supervisor import Supervisor


def train_again(
    config: Path, overrides: Sequence[str], runs: Path, resume: bool, allowed: Sequence[str], retries: int
) -> int:
    """Train to an end, with up to `retries` restarts; returns the last attempt's exit code."""
    name = apply_overrides(read_tree(config), overrides).get("name")
    safe = ["-P"] if sys.flags.safe_path else []
    command = [
        *(sys.executable, *safe, "-m", "megasharp.cli", "train", str(config), *overrides, "--runs", str(runs)),
        *(part for key in allowed for part in ("--allow-change", key)),
        *(["--resume"] if resume else []),
    ]
    # Where there is no name, the child says so, as of every other mistake.
    again = () if resume else ("--resume",)
    return Supervisor(command, runs / str(name), note, again).run(retries)
