"""`megasharp train --retries`: the same command in a child, again after failures. Imports nothing that takes long."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megasharp.common.exit_codes import note
from megasharp.common.supervisor import Supervisor
from megasharp.common.watchdog import STAGE_TIMEOUT_S
from megasharp.config.core import Tree, apply_overrides, find, read_tree


def train_again(
    config: Path, overrides: Sequence[str], runs: Path, resume: bool, allowed: Sequence[str], retries: int
) -> int:
    """Train to an end, with up to `retries` restarts; returns the last attempt's exit code."""
    tree = apply_overrides(read_tree(find(str(config))), overrides)
    safe = ["-P"] if sys.flags.safe_path else []
    command = [
        *(sys.executable, *safe, "-m", "megasharp.cli", "train", str(config), *overrides, "--runs", str(runs)),
        *(part for key in allowed for part in ("--allow-change", key)),
        *(["--resume"] if resume else []),
    ]
    # Where there is no name, the child says so, as of every other mistake.
    again = () if resume else ("--resume",)
    supervisor = Supervisor(command, runs / str(tree.get("name")), note, again, stopped_limit_s=_stopped_limit(tree))
    return supervisor.run(retries)


def _stopped_limit(tree: Tree) -> float | None:
    """The run's `guard.stage_timeout_s`."""
    guard = tree.get("guard")
    limit = guard.get("stage_timeout_s", STAGE_TIMEOUT_S) if isinstance(guard, dict) else STAGE_TIMEOUT_S
    # What the child will refuse limits nothing here.
    return limit if isinstance(limit, int | float) else None
