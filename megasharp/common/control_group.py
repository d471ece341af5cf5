"""Limits of this process's control group (cgroup), of either version, and of the groups above it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNTED, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit() -> int | None:
    """Return the least limit on memory, in bytes; None where there is none."""
    return least_memory(_own(), _MOUNTED)


def core_limit() -> float | None:
    """Return the least quota of CPU time, in cores; None where there is none."""
    return least_cores(_own(), _MOUNTED)


def least_memory(own: str, mounted: Path) -> int | None:
    """Do as `memory_limit`; `own` is the text of /proc/self/cgroup, `mounted` the folder where groups are mounted."""
    found = [int(text) for text in _values(own, mounted, "memory", ("memory.limit_in_bytes",), "memory.max")]
    # Version 1 writes "no limit" as the largest number of pages.
    least = min(found, default=None)
    return None if least is None or least >= 1 << 60 else least


def least_cores(own: str, mounted: Path) -> float | None:
    """Do as `core_limit`, with the arguments of `least_memory`."""
    quotas = _values(own, mounted, "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), "cpu.max")
    return min((int(quota) / int(period) for quota, period in map(str.split, quotas)), default=None)


def _own() -> str:
    return _OWN.read_text(encoding="ascii") if _OWN.is_file() else ""


def _values(own: str, mounted: Path, controller: str, first: tuple[str, ...], second: str) -> Iterator[str]:
    """Yield what the files of a limit say, in this group and in those above it, where they limit anything.

    `first` are the files of version 1, whose texts are joined, and `second` is that of version 2. In a container the
    group's path may be the host's, which is not seen: then the mounted root is the group.
    """
    lines = [line.split(":", 2) for line in own.splitlines()]
    controllers = {name: path for _, names, path in lines for name in names.split(",")}
    version_1 = controller in controllers
    root, files = (mounted / controller, first) if version_1 else (mounted, (second,))
    group = root / controllers.get(controller, controllers.get("", "/")).lstrip("/")
    for folder in (group, *group.parents):
        if all((folder / file).is_file() for file in files):
            text = " ".join((folder / file).read_text(encoding="ascii").strip() for file in files)
            if text[:1].isdigit():
                yield text
        if folder == root:
            break
