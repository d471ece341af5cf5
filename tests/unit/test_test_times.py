"""The table of what tests cost, from a report that pytest wrote."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from test_times import read_report, table, write_table

REPOSITORY = Path(__file__).parents[2]
CONFTEST = (REPOSITORY / "tests" / "conftest.py").read_text()
TESTS = """
import subprocess, sys, pytest
BURN = "import time\\nwhile time.process_time() < 0.5: pass"
def test_in_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)
@pytest.mark.costly("it must be seen")
def test_cheap():
    pass
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small suite below the repository's own conftest.py."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  long(slice): x\n  costly(why): x\n")
    inner = folder / "tests" / "unit"
    inner.mkdir(parents=True)
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "support").symlink_to(REPOSITORY / "tests" / "support")
    (inner / "test_one.py").write_text(TESTS)
    file = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}", "tests"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return file


def test_seconds_of_child_processes_and_reasons_are_in_the_report(report: Path) -> None:
    child, cheap = read_report(report)
    assert (child.folder, child.name) == ("unit", "unit/test_one::test_in_a_child")
    # The kernel counts in ticks of a hundredth of a second.
    assert child.cpu_s > 0.4 > cheap.cpu_s
    assert (child.reason, cheap.reason) == ("", "it must be seen")


def test_the_table_replaces_the_one_before(report: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- tools/test_times.py -->\nformer\n<!-- end -->\nafter\n")
    text = table(read_report(report))
    write_table(readme, text, date(2026, 1, 2))
    written = readme.read_text()
    assert "| unit | 2 |" in written and "former" not in written and "Measured on 2026-01-02." in written
    assert written.startswith("before\n") and written.endswith("<!-- end -->\nafter\n")
    assert written.count("test_in_a_child") == 1
