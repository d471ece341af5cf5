"""What Ray's processes are started with: variables and the size of the object store. Imports no ray."""

from __future__ import annotations

import shutil

_SMALLEST_STORE = 80 * (1 << 20)


def server_environment(limit: float) -> dict[str, str]:
    """Ray's servers are told through their environment, which all of their processes inherit; `limit` in seconds."""
    return {
        "RAY_AUTH_MODE": "token",
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
    """What every process of ours that talks to Ray has in its environment."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # An actor without a GPU keeps what it inherited; engines get theirs by name.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def object_store_bytes(wanted: int) -> int:
    """At most half of what shared memory has left: beyond it Ray would use files and say so on the screen."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return max(_SMALLEST_STORE, wanted)
    return max(_SMALLEST_STORE, min(wanted, free // 2))
