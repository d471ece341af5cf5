"""A study's findings on the screen and on disk: tables, claims beside the paper's figures, CSV files, one PNG."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from megasharp.files import write_text
from megasharp.labs.study import Cell, Claim, Findings, Outcome, Study, Table
from megasharp.report.style import save_figure

_STYLES = {Outcome.REPRODUCED: "green", Outcome.PARTLY: "yellow", Outcome.DIFFERS: "red"}
_CLAIM_COLUMNS = ("where", "statement", "paper", "ours", "outcome")


def write_findings(study: Study, findings: Findings, folder: Path) -> list[Path]:
    """Write `<table>.csv` for every table, `claims.csv` and `<study>.png` into `folder`; returns their paths.

    Raises UserError when a file cannot be written.
    """
    paths = [_write_csv(folder / f"{table.name}.csv", table.columns, table.rows) for table in findings.tables]
    rows = tuple((c.where, c.statement, c.paper, c.ours, str(c.outcome)) for c in findings.claims)
    paths.append(_write_csv(folder / "claims.csv", _CLAIM_COLUMNS, rows))
    paths.append(save_figure(findings.figure, folder / f"{study.name}.png"))
    return paths


def print_findings(study: Study, findings: Findings, console: Console) -> None:
    """Show settings, tables and claims."""
    console.print(f"[bold]{study.name}[/bold]: {escape(study.title)} (arXiv {study.paper})")
    console.print(findings.settings, markup=False)
    for table in findings.tables:
        console.print(_grid(table))
    console.print(_claims(findings.claims))


def _grid(table: Table) -> Grid:
    grid = Grid(title=escape(table.title), title_justify="left")
    for index, column in enumerate(table.columns):
        numeric = all(not isinstance(row[index], str) for row in table.rows)
        grid.add_column(escape(column), justify="right" if numeric else "left")
    for row in table.rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _claims(claims: tuple[Claim, ...]) -> Grid:
    grid = Grid(title="claims of the paper", title_justify="left", show_lines=True)
    for column in _CLAIM_COLUMNS:
        grid.add_column(column)
    for claim in claims:
        outcome = f"[{_STYLES[claim.outcome]}]{claim.outcome}[/]"
        texts = (claim.where, claim.statement, claim.paper, claim.ours)
        grid.add_row(*map(escape, texts), outcome)
    return grid


def _text(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else escape(str(cell))


def _write_csv(path: Path, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...]) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return path
