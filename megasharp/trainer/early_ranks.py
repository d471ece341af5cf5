"""The start of the process that ranks on CPUs are forked from, before this one has imported torch.

Its imports take as long as the driver's own, and go on beside them on another core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megasharp.common import fork_server
from megasharp.common.errors import UserError
from megasharp.config.core import Tree, apply_overrides, find, read_tree

# The code of checkpoints is imported late elsewhere; ranks that wrote one would each import it again.
_MODULES = ("megasharp.learner.ranks.processes", "megasharp.learner.async_checkpoint", "megasharp.trainer.rank_engines")
_SIZES = ("dp", "tp", "pp", "cp")
_GPU = Path("/dev/nvidiactl")


def fork_soon() -> None:
    """Start the process that ranks are forked from, if it does not run yet."""
    fork_server.start(_MODULES)


def expect_ranks(file: Path, overrides: Sequence[str]) -> None:
    """Start that process where the run file asks for several ranks on CPUs here, or may get them as it says nothing.

    Mistakes in the file are refused elsewhere.
    """
    with suppress(UserError):
        if _may_have_ranks(apply_overrides(read_tree(find(str(file))), overrides)):
            fork_soon()


def _may_have_ranks(tree: Tree) -> bool:
    found = (tree.get(name) for name in ("policy", "cluster", "rollout"))
    policy, cluster, rollout = (table if isinstance(table, dict) else {} for table in found)
    if _GPU.exists() or policy.get("device") == "cuda" or cluster.get("backend", "local") != "local":
        return False
    if any(policy.get(size) not in (None, 1) for size in _SIZES):
        return True
    silent = policy.get("dp") is None and rollout.get("engine", "inprocess") == "inprocess"
    return silent and not tree.get("deterministic") and _cores() > 1


def _cores() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal():
        return int(given)
    # macOS does not say which cores a process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
