"""Finding suites and their data."""

from __future__ import annotations

import pytest

from megasharp.common.errors import UserError
from megasharp.evals.suites import load_suite

PROBLEM = '{"id": "own-0", "numbers": [1, 2], "target": 3}\n'


@pytest.mark.parametrize(("name", "size"), [("countdown_dev", 128), ("countdown_test", 256)])
def test_shipped_suites_load_from_any_working_directory(name, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = load_suite(name)
    assert (suite.name, suite.task, len(suite.items)) == (name, "countdown", size)


def test_a_suite_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "task"
    folder.mkdir(parents=True)
    (tmp_path / "own.jsonl").write_text(PROBLEM)
    (folder / "countdown_dev.yaml").write_text("task: countdown\npath: own.jsonl\n")
    assert [item.id for item in load_suite("countdown_dev").items] == ["own-0"]


def test_a_path_and_data_beside_it(tmp_path):
    (tmp_path / "own.jsonl").write_text(PROBLEM)
    (tmp_path / "mine.yaml").write_text("task: countdown\npath: own.jsonl\n")
    suite = load_suite(str(tmp_path / "mine.yaml"))
    assert suite.name == "mine"
    assert suite.items[0].text == "1 2=3:"


def test_an_unknown_suite_lists_the_known_ones():
    with pytest.raises(UserError, match=r"no suite 'math'; known suites: .*countdown_dev, countdown_test"):
        load_suite("math")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: countdown\npath: nowhere.jsonl\n", "no data 'nowhere.jsonl'"),
        ("task: chess\npath: own.jsonl\n", "unknown task 'chess'"),
        ("task: countdown\n", "name its data file as path"),
        ("task: countdown\npath: own.jsonl\nk: 3\n", "k: unknown key"),
    ],
)
def test_a_wrong_suite_file_is_one_line(tmp_path, text, message):
    (tmp_path / "own.jsonl").write_text(PROBLEM)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_suite(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)
