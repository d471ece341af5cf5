"""Data files of programming problems: every shape is read, and every mistake is one line that names file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.code import CallTest, CodeAnswer, StdinTest
from megasharp.tasks.table import load_items

SUM = {"id": "sum", "prompt": "Add.", "stdin": [["2 3\n", "5\n"]]}


def written(folder: Path, *records: object) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def test_every_shape(tmp_path: Path) -> None:
    calls = {"id": "b", "prompt": "p", "function": "f", "calls": [[["[1]", '"x"'], "2"]]}
    check = {"id": "c", "prompt": "p", "function": "f", "check": "def check(candidate): ...", "setup": "x = 1"}
    items = load_items("code", written(tmp_path, SUM, calls, check))
    assert [(item.id, item.task, item.text, item.source) for item in items] == [
        ("sum", "code", "Add.", "problems.jsonl"),
        ("b", "code", "p", "problems.jsonl"),
        ("c", "code", "p", "problems.jsonl"),
    ]
    assert [item.answer for item in items] == [
        CodeAnswer(stdin=(StdinTest("2 3\n", "5\n"),)),
        CodeAnswer(function="f", calls=(CallTest(("[1]", '"x"'), "2"),)),
        CodeAnswer(function="f", check="def check(candidate): ...", setup="x = 1"),
    ]


@each_case(
    ("record", "message"),
    [
        ([], "not a JSON object"),
        ({**SUM, "id": 3}, "'id' must be a non-empty string"),
        ({**SUM, "prompt": ""}, "'prompt' must be a non-empty string"),
        ({"id": "a", "prompt": "p"}, "no tests; give stdin, calls or check"),
        ({**SUM, "stdin": [["2 3"]]}, "'stdin' must be a list of .* got \\['2 3'\\]"),
        ({**SUM, "stdin": "2 3"}, "'stdin' must be a list of"),
        ({**SUM, "calls": [[["1"], "1"]]}, "'function' must name what calls and check are of"),
        ({**SUM, "function": "f", "calls": [[["x"], "1"]]}, "'calls' must be a list of"),
        ({**SUM, "function": "f", "calls": [[["1"], "x"]]}, "is no JSON text: 'x'"),
        ({**SUM, "setup": 3}, "'setup' must be a string"),
    ],
)
def test_a_bad_line(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(UserError, match=f"problems.jsonl:1: .*{message}"):
        load_items("code", written(tmp_path, record))


def test_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read this data file"):
        load_items("code", tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no problems in this data file"):
        load_items("code", written(tmp_path).parent / "problems.jsonl")
    with pytest.raises(UserError, match="the id 'sum' appears twice"):
        load_items("code", written(tmp_path, SUM, SUM))
