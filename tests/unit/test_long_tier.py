"""Slices of the long tier: which are due, what a green run records, and that each long test is in one of them."""

from __future__ import annotations

import dataclasses
import re
from datetime import date
from pathlib import Path

import long_tier
import pytest
import test_other_megatron
from long_tier import Slice, choose, read_slices, record

REPOSITORY = Path(__file__).parents[2]
SLICES = read_slices()
LONG = re.compile(r"mark\.long\b(?:\((?:\"([^\"]*)\")?\))?")


def slice_of(name: str, minutes: float, day: int, *guards: str) -> Slice:
    return Slice(name, guards, minutes, date(2026, 1, day), tests=(f"tests/{name}",))


def taken(slices: list[Slice], changed: list[str], commit: str = "c") -> list[str]:
    return [choice.slice.name for choice in choose(slices, changed, commit, minutes=20.0) if choice.taken]


def test_changed_slices_run_then_the_one_that_was_green_longest_ago() -> None:
    slices = [slice_of("a", 5, 4, "src/a"), slice_of("b", 5, 3, "src/b"), slice_of("old", 5, 1, "src/old")]
    assert taken(slices, []) == ["old"]
    assert taken(slices, ["src/a/x.py", "src/about.py"]) == ["a", "old"]
    assert taken(slices, ["tests/b/test_x.py", "src/a"]) == ["b", "a", "old"]
    assert taken(slices, ["src/old/x.py"]) == ["old"]


def test_no_more_is_taken_than_fits_and_the_oldest_has_its_place() -> None:
    slices = [slice_of("a", 10, 4, "src"), slice_of("b", 8, 3, "src"), slice_of("old", 9, 1, "else")]
    assert taken(slices, ["src/x.py"]) == ["b", "old"]
    reasons = {choice.slice.name: choice.reason for choice in choose(slices, ["src/x.py"], "c", 20.0)}
    assert reasons["a"] == "src/x.py changed, but its 10 minutes do not fit"


def test_slices_of_one_date_take_turns() -> None:
    slices = [slice_of(name, 5, 1) for name in "abcde"]
    assert {taken(slices, [], commit=str(number))[0] for number in range(50)} == set("abcde")


def test_a_green_run_changes_its_own_table_only(tmp_path: Path) -> None:
    first = "# A comment.\n\n[ab]\nminutes = 3\ngreen = 2026-01-01\n\n"
    text = f'{first}[a]\ntests = ["[x]"]\nminutes = 4\ngreen = 2026-01-02\n'
    file = tmp_path / "slices"
    file.write_text(text)
    record("ab", 7, date(2026, 2, 3), file)
    assert file.read_text() == text.replace("minutes = 3\ngreen = 2026-01-01", "minutes = 7\ngreen = 2026-02-03")
    record("a", 9, date(2026, 2, 3), file)
    assert file.read_text().endswith("minutes = 9\ngreen = 2026-02-03\n")
    assert file.read_text().startswith("# A comment.\n\n[ab]\nminutes = 7\n")


def test_every_long_test_is_run_by_its_slice_and_no_slice_is_longer_than_a_quarter_of_an_hour() -> None:
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for name in LONG.findall(file.read_text()) if file != Path(__file__) else ():
            assert name in SLICES, f"{file}: mark.long names no slice of .ci/slices, but {name!r}"
            path = str(file.relative_to(REPOSITORY))
            assert any(path == root or path.startswith(f"{root}/") for root in SLICES[name].tests), f"{name}: {path}"
    assert all(one.minutes <= 15 for one in SLICES.values())


def test_slices_name_what_is_there_and_guard_every_package() -> None:
    for one in SLICES.values():
        for path in (*one.guards, *one.tests, *one.program[:1]):
            assert (REPOSITORY / path).exists(), f"{one.name}: {path}"
    packages = {f"megasharp/{path.parent.name}" for path in (REPOSITORY / "megasharp").glob("*/__init__.py")}
    modules = {f"megasharp/{path.name}" for path in (REPOSITORY / "megasharp").glob("[!_]*.py")}
    guarded = {guard for one in SLICES.values() for guard in one.guards}
    missing = (packages | modules | {"constraints.txt", "pyproject.toml"}) - guarded
    assert not missing, f"guarded by no slice: {sorted(missing)}"


def test_what_cannot_be_built_is_not_green(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the other slices still run."""
    slices = {name: dataclasses.replace(slice_of(name, 5, 1), make=("no-such-target",)) for name in ("a", "b")}
    monkeypatch.setattr(long_tier, "read_slices", lambda: slices)
    assert long_tier.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not green: a, b"


def test_the_files_of_the_other_megatrons_slice_exist() -> None:
    """They are named in a program, so no collection finds one that was renamed."""
    folder = REPOSITORY / "tests" / "multirank" / "learner"
    assert [name for name in test_other_megatron.FILES if not (folder / f"test_{name}.py").is_file()] == []
