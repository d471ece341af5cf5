"""`each_case` goes through all cases, names each that fails, and no case sees what another left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case

REPOSITORY = Path(__file__).parents[2]
SUITE = """
import enum, os, sys
import pytest
from cases import each_case

class Colour(enum.Enum):
    RED = "red"

log = []

@pytest.fixture(autouse=True)
def around(monkeypatch):
    monkeypatch.setenv("AROUND", "")
    log.append("around")

@pytest.fixture(scope="module")
def wide():
    log.append("wide")
    return []

@pytest.fixture
def folder(tmp_path):
    (tmp_path / "new").mkdir()
    yield tmp_path
    log.append(f"end of {tmp_path.name}")

@pytest.fixture
def twice(number):
    return 2 * number

@each_case("number", [0, 1, 2, 3])
def test_half_fail(number, capsys):
    assert number % 2 == 0

@each_case(("number", "word"), [(1, "one"), (2, "two!")])
@each_case("colour", lambda: [Colour.RED, None, len, [1]], ids=lambda value: "list" if value == [1] else None)
def test_products(number, word, colour, twice):
    assert twice == 2 * number and number != 2

@each_case("number", [0, 1], ids=["first", "second"])
def test_own_fixtures(number, folder, tmp_path, monkeypatch, wide, capsys, caplog):
    assert folder == tmp_path and [path.name for path in folder.iterdir()] == ["new"]
    assert os.environ["AROUND"] == "" and "LEFT" not in os.environ and not hasattr(sys, "left")
    os.environ["AROUND"] = "changed"
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.setattr(sys, "left", 1, raising=False)
    assert capsys.readouterr().out == "" and caplog.text == ""
    print("out")
    wide.append(number)
    assert wide == list(range(number + 1))

def test_what_was_built():
    assert "LEFT" not in os.environ and not hasattr(sys, "left")
    assert log.count("wide") == 1 and len({line for line in log if line.startswith("end of")}) == 2

@pytest.mark.skipif(True, reason="as marked")
@each_case("number", [0])
def test_marked(number):
    raise AssertionError

@each_case("number", [])
def test_without_cases(number):
    pass

@pytest.fixture
def broken():
    raise ValueError("broken")

@each_case("number", [5, 6])
def test_broken_fixture(number, broken):
    pass

@each_case("number", [7, 8])
def test_skipped_in_part(number):
    if number == 7:
        pytest.skip("seven")
"""


def test_cases_are_independent_and_every_failure_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests" / "support")}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    told = re.findall(r"^(SUBFAILED\S*|PASSED|FAILED) .*::(\w+)", done.stdout, re.MULTILINE)
    failing = {
        "test_half_fail": ["1", "3"],
        "test_products": [f"2-'two!'-{colour}" for colour in ("Colour.RED", "None", "len", "list")],
        "test_broken_fixture": ["5", "6"],
    }
    assert sorted(told) == sorted(
        [
            *((f"SUBFAILED[{label}]", name) for name, labels in failing.items() for label in labels),
            *(("FAILED", name) for name in (*failing, "test_without_cases")),
            *(("PASSED", name) for name in ("test_own_fixtures", "test_what_was_built", "test_skipped_in_part")),
        ]
    ), done.stdout
    assert "1 skipped" in done.stdout and "there is no case" in done.stdout


def test_a_name_is_given_once() -> None:
    with pytest.raises(AssertionError, match="twice"):

        @each_case("a", [1])
        @each_case(("b", "a"), [(1, 2)])
        def test_(a: int, b: int) -> None: ...
