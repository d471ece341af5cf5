"""Numbers as a person reads them: durations, sizes, moments; and tables that show a run's words as they are."""

from __future__ import annotations

import time

from rich.table import Table
from rich.text import Text


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


class Columns:
    """A table without lines, its headings in this style; what does not fit is folded.

    Cells are shown as they are. rich reads brackets and colons of a plain string as markup, and an error's words, a
    host's name or a key's value may hold any: it would leave them out, or fail.
    """

    def __init__(self, *headings: str, style: str) -> None:
        self._table = Table(box=None, pad_edge=False, header_style=style)
        for heading in headings:
            self._table.add_column(Text(heading), overflow="fold")

    def add_row(self, *cells: str) -> None:
        """One line more."""
        self._table.add_row(*map(Text, cells))

    def __rich__(self) -> Table:
        return self._table
