"""Numbers as a person reads them: durations, sizes, moments; and the tables that they stand in."""

from __future__ import annotations

import time

from rich.table import Table


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def moment(seconds: float) -> str:
    """A time since 1970 as a date and a time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def columns(*headings: str, style: str) -> Table:
    """An empty table without lines, its headings in this style; what does not fit is folded."""
    table = Table(box=None, pad_edge=False, header_style=style)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
