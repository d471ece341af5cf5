"""How long a test waits for what must come: one limit that only a hang reaches, however busy or slow the machine is.

A test that says "at once" or "within" compares with how long the wrong way would take, and leaves room for a machine
several times slower than a quiet one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# Below the limit of a whole test (`timeout` in pyproject.toml), so that what hangs can still be shown and ended.
HANG_S = 500.0
# For what must be gone, and would go by itself a while later.
SOON_S = 60.0


def wait_until(ready: Callable[[], object], otherwise: Callable[[], object] = str) -> None:
    """Ask again and again; fails with what `otherwise` says after HANG_S seconds."""
    deadline = time.monotonic() + HANG_S
    while not ready():
        assert time.monotonic() < deadline, f"it never came about {otherwise()}"
        time.sleep(0.02)


def is_pending(process: int, number: int) -> bool:
    """Return True while a signal is pending for the process."""
    return _has(process, "ShdPnd", number)


def is_ignored(process: int, number: int) -> bool:
    """Return True once the process ignores a signal."""
    return _has(process, "SigIgn", number)


def _has(process: int, name: str, number: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    signals = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return bool(int(signals, 16) >> (number - 1) & 1)
