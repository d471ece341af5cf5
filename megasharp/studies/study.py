"""A study and its findings: tables, claims of the paper beside our numbers, and a picture.

Findings are shown on the screen and written as CSV files and one PNG.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from megasharp.common.files import write_text
from megasharp.metrics.console import SafeConsole
from megasharp.reporting.style import save_figure

Cell = str | int | float


class Outcome(StrEnum):
    """The verdict on a claim of the paper."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class Table:
    """One table; `name` is a short file name (its CSV is `<name>.csv`), floats are shown with 3 digits."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper and our result.

    Example: `Claim("fig 5", "GRPO keeps one mode", "1 mode", "median 1.0 modes of 20 seeds", Outcome.REPRODUCED)`.
    `ours` and `outcome` are computed from the run, never written by hand.
    """

    where: str
    statement: str
    paper: str
    ours: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """Everything a study reports. `settings` says what the paper left open and what was chosen (lr, steps, ...)."""

    settings: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    figure: Figure


@dataclass(frozen=True, slots=True)
class Options:
    """`seeds`: how many runs (None: the study's own number); `seed`: the first one; `model`: a Hugging Face folder."""

    seeds: int | None = None
    seed: int = 0
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """A named study. `paper` is its arXiv number, `title` one line for the list; `takes_model`: it measures a model."""

    name: str
    paper: str
    title: str
    run: Callable[[Options], Findings]
    takes_model: bool = False


_STYLES = {Outcome.REPRODUCED: "green", Outcome.PARTLY: "yellow", Outcome.DIFFERS: "red"}
_CLAIM_COLUMNS = ("where", "statement", "paper", "ours", "outcome")
# A claim's four texts share what its outcome leaves of a line in these parts: the words of the paper are short.
_CLAIM_RATIOS = (2, 4, 3, 6)
# Columns of a file or a pipe, which have no width of their own; rich would take 80.
_PIPED_WIDTH = 160


def write_findings(study: Study, findings: Findings, folder: Path) -> list[Path]:
    """Write `<table>.csv` for every table, `claims.csv` and `<study>.png` into `folder`; returns their paths.

    Raises UserError when a file cannot be written.
    """
    paths = [_write_csv(folder / f"{table.name}.csv", table.columns, table.rows) for table in findings.tables]
    rows = tuple((c.where, c.statement, c.paper, c.ours, str(c.outcome)) for c in findings.claims)
    paths.append(_write_csv(folder / "claims.csv", _CLAIM_COLUMNS, rows))
    paths.append(save_figure(findings.figure, folder / f"{study.name}.png"))
    return paths


def open_console() -> Console:
    """Open a console on standard output: as wide as the terminal, or 160 columns where there is none."""
    return SafeConsole(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_findings(study: Study, findings: Findings, console: Console) -> None:
    """Show settings, tables and claims."""
    console.print(f"[bold]{study.name}[/bold]: {escape(study.title)} (arXiv {study.paper})")
    console.print(findings.settings, markup=False)
    claims = _empty_grid("claims of the paper")
    claims.show_lines, claims.expand = True, True
    for column, ratio in zip(_CLAIM_COLUMNS[:-1], _CLAIM_RATIOS, strict=True):
        claims.add_column(column, overflow="fold", ratio=ratio)
    claims.add_column(_CLAIM_COLUMNS[-1], overflow="fold", no_wrap=True)
    for claim in findings.claims:
        outcome = f"[{_STYLES[claim.outcome]}]{claim.outcome}[/]"
        texts = (claim.where, claim.statement, claim.paper, claim.ours)
        claims.add_row(*map(escape, texts), outcome)
    for grid in (*map(_grid, findings.tables), claims):
        console.print()
        console.print(grid)


def _grid(table: Table) -> Grid:
    grid = _empty_grid(escape(table.title))
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        if any(not isinstance(cell, str) for cell in cells):
            # The narrowest width that breaks neither a cell nor a word of the heading.
            width = max(map(len, (*column.split(), *map(cell_text, cells))))
            grid.add_column(escape(column), justify="right", overflow="fold", width=width)
        else:
            grid.add_column(escape(column), overflow="fold")
    for row in table.rows:
        grid.add_row(*(escape(cell_text(cell)) for cell in row))
    return grid


def _empty_grid(title: str) -> Grid:
    # Lines around every cell would cost a tenth of 80 columns, and a number that does not fit is broken in two.
    return Grid(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False
    )


def cell_text(cell: Cell) -> str:
    """Format a cell for the screen: floats with three significant digits or all before the point (CSV has more)."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if 1000 <= abs(cell) < 1e6 else f"{cell:.3g}"


def _write_csv(path: Path, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...]) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return path
