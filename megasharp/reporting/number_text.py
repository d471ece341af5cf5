"""Numbers as text for a person (durations, sizes, moments), and tables that show a run's text unchanged."""

from __future__ import annotations

import time

from rich.table import Table
from rich.text import Text

from megasharp.common.terminal import visible


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Format bytes in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def moment(seconds: float) -> str:
    """Format seconds since 1970 as date and time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


class Columns:
    """A table without lines, its headings in `style`; long cells are folded.

    Cells are shown unchanged. rich reads brackets and colons of a plain string as markup, which an error message, a
    host's name or a key's value may contain: it would leave them out, or fail.
    """

    def __init__(self, *headings: str, style: str) -> None:
        self._table = Table(box=None, pad_edge=False, header_style=style)
        for heading in headings:
            self._table.add_column(Text(heading), overflow="fold")

    def add_row(self, *cells: str) -> None:
        """Add a row."""
        # Before it is drawn, because the columns are as wide as what is shown.
        self._table.add_row(*(Text(visible(cell)) for cell in cells))

    def __rich__(self) -> Table:
        return self._table
