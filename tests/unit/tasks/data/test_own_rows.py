"""A user's own rows: every kind of file gives the same problems, all turns and columns stay, an odd row is one line."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import datasets
import pytest
import yaml
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import validate
from megasharp.config.data import DataSource
from megasharp.tasks.choice import ChoiceAnswer
from megasharp.tasks.judge import TaskItem, digest_of
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.own_rows import OwnAnswer
from megasharp.tasks.problems import load_problems, prompt_of

ROWS: list[dict[str, object]] = [
    {"question": "What is 1+1?", "answer": "2", "level": 1},
    {"question": "What is {x}?", "answer": "7", "level": 3},
]


def problems(folder: Path, keys: str) -> list[TaskItem]:
    source = validate(DataSource, yaml.safe_load(f"{{{keys}}}"), "run.yaml")
    assert source.path is not None
    return load_problems(source, folder / source.path, prompt_of(source))


def written(folder: Path, rows: list[dict[str, object]], name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.to_csv(str(tmp_path / "rows.csv"))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder", ROWS, "train-00000.jsonl")
    written(tmp_path / "folder", ROWS[:1], "test.jsonl")
    kinds = ("rows.jsonl", "rows.json", "rows.parquet", "rows.csv", "saved", "splits", "folder")
    read = {kind: problems(tmp_path, f"path: {kind}") for kind in kinds}
    for kind, items in read.items():
        assert [(item.text, item.question) for item in items] == [(row["question"],) * 2 for row in ROWS], kind
        assert [item.answer.value for item in items if isinstance(item.answer, OwnAnswer)] == ["2", "7"], kind
        assert items[1].row is not None and str(items[1].row["level"]) == "3", kind
    for kind in ("splits", "folder"):
        assert len(problems(tmp_path, f"path: {kind}, split: test")) == 1
        with pytest.raises(UserError, match=r"no .*split 'dev' \(data.split\); there are"):
            problems(tmp_path, f"path: {kind}, split: dev")


def test_messages_keep_all_their_turns_and_words_are_put_around_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "And 2+2?")]
    talk = [{"role": role, "content": text} for role, text in turns]
    rows: list[dict[str, object]] = [
        {"prompt": talk, "reward_model": {"ground_truth": 4}},
        {"prompt": talk[1:], "reward_model": {"ground_truth": 4}},
    ]
    written(tmp_path, rows)
    own, without = problems(tmp_path, "path: rows.jsonl, system: Think.")
    assert "1 of 2 prompts keep their own system message; data.system is put before others" in capsys.readouterr().err
    assert own.turns == tuple(turns)
    assert without.turns == (("system", "Think."), *turns[1:])
    assert isinstance(own.answer, OwnAnswer) and own.answer.value == 4
    written(tmp_path, ROWS)
    _, braces = problems(tmp_path, 'path: rows.jsonl, system: S, template: "Level {level}: {question} {y}"')
    assert braces.turns == (("system", "S"), ("user", "Level 3: What is {x}? {y}"))


def test_what_was_found_by_its_name_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(
        tmp_path,
        [{"problem": "x", "reward_model": {"ground_truth": 2}}, {"problem": "y", "reward_model": {"ground_truth": 3}}],
    )
    problems(tmp_path, "path: rows.jsonl")
    said = "rows.jsonl: prompts are its column problem, answers are its reward_model.ground_truth"
    assert said in capsys.readouterr().err
    problems(tmp_path, "path: rows.jsonl, prompt_key: problem, answer_key: reward_model.ground_truth")
    assert capsys.readouterr().err == ""


def test_columns_travel_as_plain_values(tmp_path: Path) -> None:
    day = datetime.date(2026, 11, 25)
    rows = [{"prompt": "x", "day": day, "picture": b"GIF", "inner": {"parts": [1, None], "day": day}}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    (item,) = problems(tmp_path, "path: rows.parquet")
    assert item.row == {"prompt": "x", "day": "2026-11-25", "inner": {"parts": [1, None], "day": "2026-11-25"}}


def test_an_edited_column_is_another_set_of_problems(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    before = digest_of(problems(tmp_path, "path: rows.jsonl"))
    written(tmp_path, [{**ROWS[0], "level": 2}, ROWS[1]])
    assert digest_of(problems(tmp_path, "path: rows.jsonl")) != before


def test_a_task_judges_own_rows_by_their_answer(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"q": "1+1?", "a": a} for a in (2, 2.0, "so\n#### 1,002", "2")]
    written(tmp_path, rows)
    items = problems(tmp_path, "path: rows.jsonl, task: math, prompt_key: q, answer_key: a")
    assert [item.answer for item in items] == [MathAnswer(gold) for gold in ("2", "2", "1002", "2")]
    assert "boxed" in items[0].turns[0][1]
    with pytest.raises(
        UserError, match="task code cannot judge rows of your own by one answer; tasks that can: choice, "
    ):
        problems(tmp_path, "path: rows.jsonl, task: code, prompt_key: q, answer_key: a")


def test_choices_of_own_rows_are_asked_with_their_options(tmp_path: Path) -> None:
    """By MMLU's numbers, by letters, and by the text of an option."""
    row = {"q": "Which is a metal?", "choices": ["salt", "iron"]}
    for answer in (1, "b", "iron", "1"):
        written(tmp_path, [{**row, "a": answer}])
        (item,) = problems(tmp_path, "path: rows.jsonl, task: choice, prompt_key: q, answer_key: a")
        assert item.answer == ChoiceAnswer("B", ("A", "B"))
        assert "Which is a metal?\nOptions:\nA. salt\nB. iron\nPlease reason" in item.turns[-1][1]
    for odd, message in (
        ({**row, "a": 2}, "row rows.jsonl-1: 'a' must be one of the labels A, B, the text of an option, or its number"),
        ({"q": "x", "a": "A"}, "needs a column choices, a list of texts .*; there is no field .* only: q, a"),
    ):
        written(tmp_path, [odd])
        with pytest.raises(UserError, match=message):
            problems(tmp_path, "path: rows.jsonl, task: choice, prompt_key: q, answer_key: a")


def test_columns_of_a_task_s_file_travel_too(tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_text('{"problem": "1+1?", "answer": "2", "level": 3}\n')
    (item,) = problems(tmp_path, "path: math.jsonl, task: math")
    assert (item.answer, item.row) == (MathAnswer("2"), {"problem": "1+1?", "answer": "2", "level": 3})


@pytest.mark.parametrize("key", ["split", "name", "revision"])
def test_keys_of_the_hub_are_refused_beside_a_file(key: str, tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    with pytest.raises(UserError, match=f"rows.jsonl is .*data.{key}=test"):
        problems(tmp_path, f"path: rows.jsonl, {key}: test")


@each_case(
    ("rows", "keys", "message"),
    [
        ([], "", "rows.jsonl: no row in it; give it one at least"),
        (
            ROWS,
            "prompt_key: questoin",
            "no column 'questoin' (data.prompt_key); is it 'question'? its columns: question",
        ),
        (
            ROWS,
            "answer_key: gold",
            "no column 'gold' (data.answer_key); is it 'answer'? its columns: question, answer, level",
        ),
        ([{"a": "x"}], "", "no column is a prompt; name one of these as data.prompt_key: a"),
        ([{"prompt": 3}], "", "'prompt' must be a text, or a list of messages such as"),
        ([{"prompt": None, "question": ""}], "", "'question' must be a text of Unicode that is not empty, got ''"),
        ([{"prompt": [{"role": "bot", "content": "x"}]}], "", "a message of 'prompt' has the role 'bot'"),
        ([{"prompt": [{"role": "user"}]}], "", "the content of a message of 'prompt' must be a text of Unicode"),
        ([{"prompt": [{"role": "assistant", "content": "x"}]}], "", "ends with a message of the assistant"),
        ([{"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": None}], "", "rows.jsonl:2: 'answer' is null"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], "template: hello", "which data.template has no place in"),
        (
            [{"prompt": "x", "question": "y"}],
            "",
            "prompt and question may be meant; name one of them as data.prompt_key",
        ),
        (
            [{"prompt": "x", "answer": 1, "label": 2}],
            "",
            "answer and label may be meant; name one of them as data.answer",
        ),
        (
            [{"prompt": "x", "answer": {"v": 1}}],
            "",
            "'answer' is an object; name an entry of it, such as data.answer_key=an",
        ),
        (
            [{"prompt": "x", "answer": 1}, {"prompt": "x", "answer": "1"}],
            "",
            "is a number in row rows.jsonl-1 and a text in",
        ),
        (
            [{"prompt": "x"}, {"prompt": [{"role": "user", "content": "x"}]}],
            "",
            "a list of messages, and a text in the rows",
        ),
        (
            [{"prompt": "x"}],
            "task: math, prompt_key: prompt",
            "task math judges by an answer; name its column as data.ans",
        ),
        (
            [{"prompt": "x", "answer": [1]}],
            "task: math, prompt_key: prompt",
            "row rows.jsonl-1: 'answer' must be a non-emp",
        ),
    ],
)
def test_an_odd_row_is_one_line(rows: list[dict[str, object]], keys: str, message: str, tmp_path: Path) -> None:
    written(tmp_path, rows)
    with pytest.raises(UserError) as caught:
        problems(tmp_path, f"path: rows.jsonl, {keys}")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_column_of_two_places_or_of_bytes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(",a,,a,b\n0,1,2,3,4\n")
    datasets.Dataset.from_dict({"q": [b"1+1"], "a": ["2"]}).to_parquet(str(tmp_path / "rows.parquet"))
    for path, keys, message in (
        ("rows.csv", "prompt_key: b", "its first line names the column 'a' twice; rename one"),
        ("rows.parquet", "prompt_key: q", "row 1: 'q' (data.prompt_key) holds bytes; write it as text"),
        ("rows.parquet", "prompt_key: a, answer_key: q", "row 1: 'q' (data.answer_key) holds bytes; write it as text"),
    ):
        with pytest.raises(UserError) as caught:
            problems(tmp_path, f"path: {path}, {keys}")
        assert str(caught.value).endswith(message)


def test_what_is_no_rows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "empty").mkdir()
    for path, message in (("rows.jsonl", "not UTF-8 text"), ("empty", "no data file"), ("a/b/c", "no such file")):
        with pytest.raises(UserError, match=message):
            problems(tmp_path, f"path: {path}")
