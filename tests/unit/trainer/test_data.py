"""`megasharp data`: what is listed and shown of sets, and training problems that are evaluated on too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasharp.cli.data import list_sets, show_set
from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.evals.contamination import decontaminate
from megasharp.tasks.prompts import TEMPLATES
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.load import load_set

REPOSITORY = Path(__file__).parents[3]
FILES = REPOSITORY / "tests" / "unit" / "tasks" / "data" / "files" / "sets"
LONG = "Find the number of pairs of whole numbers that have the sum of their squares equal to"


def test_the_list_names_every_set_and_every_prompt() -> None:
    lines: list[str] = []
    list_sets(lines.append)
    named = {line.split()[0] for line in lines if line.strip() and not line.startswith(" ")}
    assert SETS.keys() | TEMPLATES.keys() <= named
    told = next(line for line in lines if line.startswith("dapo_math_17k_en"))
    assert "14,053 +- 1 %" in told and "open-r1/DAPO-Math-17k-Processed" in told


def test_a_set_is_shown_as_a_model_reads_it() -> None:
    lines: list[str] = []
    show_set("math_levels_3to5", FILES / "math_train.jsonl", None, 1, None, lines.append)
    text = "\n".join(lines)
    assert "problems   5 " in text and "left out   5 rows: another level" in text and "licence    MIT" in text
    first = load_set("math_levels_3to5", FILES / "math_train.jsonl", "boxed_chat").items[0]
    assert first.text in text and "gold='2'" in text and text.count("--- math_levels") == 1


def test_a_chat_prompt_is_shown_as_messages_and_long_tests_are_cut() -> None:
    lines: list[str] = []
    show_set("livecodebench", FILES / "livecodebench.jsonl", None, 1, None, lines.append)
    assert any(line.startswith("[system] You are an expert") and line.endswith("[assistant]") for line in lines)


def test_with_a_model_lengths_are_in_tokens() -> None:
    lines: list[str] = []
    model = REPOSITORY / "examples" / "quickstart" / "base"
    show_set("math500", FILES / "math500.jsonl", "plain", 0, str(model), lines.append)
    assert any("tokens (the first 10)" in line for line in lines)


def test_own_rows_and_a_run_s_are_shown_as_training_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"q": "1+1?", "a": "2", "level": 3}\n{"q": "2+2?", "a": "4", "level": 1}\n')
    keys = ["--prompt-key", "q", "--answer-key", "a"]
    shown = CliRunner().invoke(app, ["data", "show", "rows.jsonl", *keys, "--system", "Be brief.", "--limit", "1"])
    assert shown.output.splitlines() == [
        "rows.jsonl: 2 problems; a function of yours judges (reward.function)",
        "columns    q, a, level",
        "prompts    15 to 15 characters, median 15; their own words",
        "",
        "--- rows.jsonl-1",
        "[system] Be brief.",
        "[user] 1+1?",
        "[assistant]",
        "--- answer: '2'",
    ]
    base = REPOSITORY / "examples" / "quickstart" / "base"
    mix = "{path: rows.jsonl, task: math, prompt_key: q, answer_key: a, source: one}"
    gsm8k = f"{{set: gsm8k, path: {FILES / 'gsm8k.jsonl'}}}"
    Path("run.yaml").write_text(f"name: a\nsteps: 1\nmodel: {{path: {base}}}\ndata: {{mix: [{mix}, {gsm8k}]}}\n")
    shown = CliRunner().invoke(app, ["data", "show", "run.yaml", "--limit", "1"])
    assert "rows.jsonl: 2 problems; task math" in shown.output and "gold='2'" in shown.output
    assert shown.output.count("tokens (the first") == 2 and "gsm8k: " in shown.output
    for wrong, message in (
        (["data", "show", "run.yaml", *keys], "run.yaml says what is read; leave --prompt-key out"),
        (["data", "show", "gsm8k", "--split", "test"], "--split is for rows of your own, not for set gsm8k"),
        (["data", "show", "row.jsonl"], "row.jsonl: no such file or folder"),
    ):
        assert message in str(CliRunner().invoke(app, wrong).exception)


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training file of five problems of which two are in one of two suites."""
    monkeypatch.chdir(tmp_path)
    train = [f"{LONG} {number}." for number in (25, 50)] + ["What is 1+1?", "What is $1 + 1$", "Add 2 and 2."]
    rows = [{"problem": text, "answer": "2", "level": 3, "kept": {"as": "it was"}} for text in train]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("a.jsonl").write_text(json.dumps({"problem": f"{LONG} 50?", "answer": "2", "unique_id": "x"}))
    Path("b.jsonl").write_text(json.dumps({"problem": "Nothing of it.", "answer": "2", "unique_id": "y"}))
    for name in "ab":
        Path(f"{name}.yaml").write_text(f"set: math500\npath: {name}.jsonl\n")
    return tmp_path


def test_what_overlaps_is_named_and_the_rest_is_written_as_it_was(suites: Path) -> None:
    lines: list[str] = []
    names = ["a.yaml", "b.yaml"]
    assert decontaminate("math12k", Path("train.jsonl"), names, 13, Path("out/clean.jsonl"), lines.append)
    assert [line.split(":")[0] for line in lines[:2]] == ["math12k/0", "math12k/1"]
    assert "math500/x, 5 shared, as: find the number of pairs" in lines[0]
    assert lines[2:] == [
        "a: 1 of 1 problems overlap with 2 of 5 problems of math12k",
        "b: 0 of 1 problems overlap with 0 of 5 problems of math12k",
        "2 of 5 problems of math12k overlap; the other 3 are in out/clean.jsonl",
    ]
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in Path("out/clean.jsonl").read_text().splitlines()] == rows[2:]
    assert not decontaminate("math12k", Path("out/clean.jsonl"), names, 13, None, lines.append)
    with pytest.raises(UserError, match=r"out/clean.jsonl: there is such a file already"):
        decontaminate("math12k", Path("train.jsonl"), names, 13, Path("out/clean.jsonl"), lines.append)


def test_a_longer_run_is_asked_for(suites: Path) -> None:
    """The two share 17 words with the evaluated problem, the number aside."""
    lines: list[str] = []
    assert decontaminate("math12k", Path("train.jsonl"), ["a.yaml"], 18, None, lines.append)
    assert lines[-1] == "1 of 5 problems of math12k overlap"


def test_a_set_of_several_tables_is_written_to_a_folder_that_is_a_path_of_it(suites: Path) -> None:
    mixed = FILES / "gsm8k_math_level1"
    with pytest.raises(UserError, match="has 2 tables; name a folder"):
        decontaminate("gsm8k_math_level1", mixed, ["a.yaml"], 13, Path("clean.jsonl"), print)
    with pytest.raises(UserError, match=r"name a file that ends in .jsonl"):
        decontaminate("math12k", Path("train.jsonl"), ["a.yaml"], 13, Path("clean"), print)
    with pytest.raises(UserError, match="name at least one suite"):
        decontaminate("math12k", Path("train.jsonl"), [], 13, None, print)
    assert not decontaminate("gsm8k_math_level1", mixed, ["a.yaml"], 13, Path("clean"), lambda line: None)
    before, after = (load_set("gsm8k_math_level1", path).items for path in (mixed, Path("clean")))
    assert [(item.text, item.answer) for item in after] == [(item.text, item.answer) for item in before]


def test_a_row_that_cannot_be_read_leaves_no_file(suites: Path) -> None:
    with Path("train.jsonl").open("a") as file:
        file.write('\n{"problem": 3}')
    with pytest.raises(UserError, match=r"train.jsonl:6: 'problem' must be"):
        decontaminate("math12k", Path("train.jsonl"), ["a.yaml"], 13, Path("out/clean.jsonl"), lambda line: None)
    assert not list(Path("out").iterdir())


def test_the_command_s_exit_codes(suites: Path) -> None:
    command = ["data", "decontaminate", "math12k", "--path", "train.jsonl", "--against"]
    assert CliRunner().invoke(app, [*command, "a.yaml,b.yaml"]).exit_code == 1
    assert CliRunner().invoke(app, [*command, "b.yaml"]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "a.yaml", "--out", "clean.jsonl"]).exit_code == 0
