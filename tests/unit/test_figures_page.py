"""The page of figures: each row is a command that exists, and the tool runs it as the page says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from cases import each_case
from figures import PAGE, Command, read_commands, run

REPOSITORY = Path(__file__).parents[2]
COMMANDS = read_commands()
FILE = re.compile(r"\b(?:tools|examples|configs|docs)/[\w./-]+\.(?:py|yaml|md)\b")


def test_each_row_is_read_once() -> None:
    tables = PAGE.read_text().partition("## Not run again")[0]
    rows = re.findall(r"^\| .+? \| `(\w+)` \|", tables, flags=re.MULTILINE)
    assert len(rows) == sum(line.startswith("| ") for line in tables.splitlines()) - tables.count("| figures | name |")
    assert len(rows) > 50 and sorted(rows) == sorted(COMMANDS)
    assert COMMANDS["expected_peaks"] == Command("python tools/expected_peaks.py", "", quiet=False)
    assert COMMANDS["fleet_on_cpu"].quiet and COMMANDS["fleet_on_cpu"].needs == "make fleet"


def test_files_and_targets_of_commands_exist() -> None:
    everything = "\n".join(each.command for each in COMMANDS.values())
    files = set(FILE.findall(everything))
    targets = set(re.findall(r"\bmake ([a-z-]+)", everything))
    rules = re.findall(r"^([a-z-]+)[a-z -]*:", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(files) > 40 and [file for file in sorted(files) if not (REPOSITORY / file).is_file()] == []
    assert targets and targets <= set(rules)


def test_commands_are_bash() -> None:
    script = "\n".join(each.command for each in COMMANDS.values())
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and checked.stderr == ""


def test_no_command_hides_a_failure(tmp_path: Path) -> None:
    """`bash -e` goes on after a failure in front of `&&`, unless the list ends the command or is one that must fail."""
    assert run("ends", "false; true", tmp_path) == 1
    assert run("expected", "(exit 3) && false; test $? = 3; true", tmp_path) == 0
    assert run("unexpected", "true && false; test $? = 3; true", tmp_path) == 1
    hidden = re.compile(r"&&(?! false; test \$\? = \d)[^;&]*;|; kill \$!$")
    assert [name for name, each in COMMANDS.items() if hidden.search(each.command)] == []


def test_what_commands_write_is_theirs_alone() -> None:
    """A folder that stays would be taken up by the next day's command, which then measures nothing."""
    kept = re.compile(r"--(?:out|runs) (?!\$RUNS|docs/images/)")
    assert [name for name, each in COMMANDS.items() if kept.search(each.command)] == []


@each_case(("name", "model"), [("plan_big", None), ("plan_gsm8k", "Qwen/Qwen2.5-0.5B")])
def test_run_files_are_cut_out_of_their_pages(tmp_path: Path, name: str, model: str | None) -> None:
    cut, plan = COMMANDS[name].command.split(" && ")
    assert run("cut", cut, tmp_path) == 0
    (file,) = (tmp_path / "cut").iterdir()
    found = yaml.safe_load(file.read_text())
    assert found["name"] in plan and found["steps"] == 200 and found.get("model", {}).get("path") == model


def test_a_command_has_an_empty_folder_and_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = 'ls "$RUNS"; echo "threads ${OMP_NUM_THREADS-all}" >&2; touch "$RUNS/left"; exit 3'
    assert [run("told", command, tmp_path) for _ in range(2)] == [3, 3]
    assert (tmp_path / "told.log").read_text() == f"$ {command}\nthreads all\n"
    assert (tmp_path / "told" / "left").is_file()
    assert capsys.readouterr().out.startswith("told: exit code 3, 0 s, 0 s of CPU; ")
