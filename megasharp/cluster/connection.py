"""Whether Ray may be asked anything: a call to servers that have ended blocks for a minute, then ends this process."""

from __future__ import annotations

import importlib
from typing import Any

from megasharp import signals


def usable() -> bool:
    """Whether this process is connected, and Ray will still be there for an answer.

    Not our own Ray after a signal: Slurm and container runtimes send it to Ray's servers too. All of it is killed then.
    """
    ray: Any = importlib.import_module("ray")
    return bool(ray.is_initialized()) and not (ray._private.worker._global_node.is_head() and signals.arrived())
