"""The output of a study: nothing is cut or broken, at any usual width and in a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from cases import each_case
from rich.console import Console

from megasharp.studies import STUDIES
from megasharp.studies.study import Findings, cell_text, open_console, print_findings

SmallRun = Callable[[str], Findings]
PIPED = 160


def printed(name: str, findings: Findings, width: int) -> str:
    text = io.StringIO()
    print_findings(STUDIES[name], findings, Console(file=text, width=width))
    return text.getvalue()


@each_case("width", [80, 100, PIPED])
@each_case("name", STUDIES)
def test_tables_show_every_figure_and_heading_whole(name: str, width: int, small_run: SmallRun) -> None:
    findings = small_run(name)
    text = printed(name, findings, width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    cells = {cell_text(cell) for table in findings.tables for row in table.rows for cell in row if cell != ""}
    headings = {word for table in findings.tables for column in table.columns for word in column.split()}
    words = {word for cell in cells for word in cell.split()}
    assert {part for part in words | headings if part not in text} == set()


@each_case("width", [100, PIPED])
@each_case("name", STUDIES)
def test_claims_show_every_word_whole(name: str, width: int, small_run: SmallRun) -> None:
    findings = small_run(name)
    text = printed(name, findings, width)
    words = {word for c in findings.claims for word in " ".join((c.where, c.statement, c.paper, c.ours)).split()}
    assert {word for word in words if word not in text} == set()


@each_case(
    ("cell", "shown"),
    [(6.9251e-05, "6.93e-05"), (0.96412, "0.964"), (1.0, "1"), (3508.66, "3509"), (2.5e7, "2.5e+07"), (20000, "20000")],
)
def test_floats_have_three_digits_and_counts_all(cell: float, shown: str) -> None:
    assert cell_text(cell) == shown


@each_case(("terminal", "width"), [(True, 93), (False, PIPED)])
def test_the_console_is_wide_where_there_is_no_terminal(
    terminal: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "93")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert open_console().width == width
