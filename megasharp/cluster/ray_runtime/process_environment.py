"""Variables, interface and object store of Ray's processes, and a test of its connection. Imports no ray.

The connection is tested before each call: one to servers that have ended blocks for a minute, then ends this process.
"""

from __future__ import annotations

import importlib
import shutil
from typing import Any

import psutil

from megasharp.common import signals
from megasharp.common.errors import UserError


def usable() -> bool:
    """Return True where this process is connected and Ray will still be there for an answer.

    Not our own Ray after a signal: Slurm and container runtimes send it to Ray's servers too. All of it is killed then.
    """
    ray: Any = importlib.import_module("ray")
    return bool(ray.is_initialized()) and not (ray._private.worker._global_node.is_head() and signals.arrived())


SMALLEST_STORE = 80 * (1 << 20)
# Ray's store on a job's nodes, in bytes, where its run needs more than is taken without it.
STORE = "MEGASHARP_RAY_STORE_BYTES"


def server_environment(limit: float) -> dict[str, str]:
    """Return the variables of Ray's servers, which all of their processes inherit; `limit` in seconds."""
    return {
        "RAY_AUTH_MODE": "token",
        # Models are folders by then.
        "HF_HUB_OFFLINE": "1",
        "RAY_gcs_server_port_wait_time_s": str(int(limit)),
        # It would end our ranks for the memory that others use.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray is nice by default, and whatever else the machine does would come before our ranks and engines.
        "RAY_worker_niceness": "0",
        # Every actor of ours gets a fresh process; idle ones in reserve only cost the start.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        **quiet(),
    }


def quiet() -> dict[str, str]:
    """Return the variables of every process of ours that talks to Ray."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # An actor without a GPU keeps what it inherited; engines get theirs by name.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def object_store_bytes(wanted: int) -> int:
    """Bound the store by half of the memory left, and of what may be shared: beyond it Ray would use files, aloud."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 2 * wanted
    return max(SMALLEST_STORE, min(wanted, free // 2, psutil.virtual_memory().available // 2))


def interface_of(address: str) -> str:
    """Return the network interface that has this address; collectives listen there and nowhere else.

    Raises UserError where this node has none.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise UserError(f"this node has no network interface with address {address}, by which Ray knows it")
