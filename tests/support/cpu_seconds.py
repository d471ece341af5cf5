"""CPU seconds of this process and of all that it started, dead or alive."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """User and system seconds of this process, its living descendants, and every descendant that was waited for."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + _of_descendants(os.getpid())


def _of_descendants(pid: int) -> float:
    total = 0.0
    for child in _children(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # utime, stime, cutime, cstime: fields 14 to 17 of proc(5), the third being the first after the name.
        total += sum(int(field) for field in fields[11:15]) / _TICKS_PER_S + _of_descendants(child)
    return total


def _children(pid: int) -> list[int]:
    try:
        lists = [task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in lists for child in text.split()]
