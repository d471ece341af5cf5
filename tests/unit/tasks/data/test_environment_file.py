"""Problems of an environment class: its file, its prompts, and what is wrong with either."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.environment import Environment, EnvironmentAnswer
from megasharp.tasks.environments.problem_file import NAMED
from megasharp.tasks.table import load_items
from megasharp.tasks.user_import import imported

GAME = """
from megasharp.tasks.environment import Environment, Observation


class Guess(Environment):
    def __init__(self, most=9):
        self.most = most

    async def reset(self, row):
        self.number = row.get("number", row.get("seed", 0) % self.most)
        if self.number > self.most:
            raise ValueError("too large")
        return Observation(f"0 to {self.most}: ")

    async def step(self, action):
        right = action == str(self.number)
        return Observation("no: ", reward=float(right), done=right, info={"answer": action})


class Mute(Guess):
    async def reset(self, row):
        return Observation()


class Text(Guess):
    def reset(self, row):
        return "begin"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAME)
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "number": 7}\n{"number": 3}\n')
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "game.yaml"
    path.write_text(text)
    return path


def test_each_row_is_a_problem_and_its_first_observation_the_prompt(folder: Path) -> None:
    path = written(folder, f"use: {folder}/games.py:Guess\noptions: {{most: 8}}\nrows: rows.jsonl\n")
    first, second = load_items("environment", path)
    assert (first.id, first.text, second.text) == ("a", "0 to 8: ", "0 to 8: ")
    assert second.id.startswith("game-00001-") and isinstance(second.answer, EnvironmentAnswer)
    environment = second.answer.environment()

    async def play() -> list[tuple[str, bool, float]]:
        await environment.reset(second.answer.row)
        found = [await environment.step(action) for action in ("5", "3")]
        return [(one.text, one.done, one.reward) for one in found]

    assert asyncio.run(play()) == [("no: ", False, 0.0), ("no: ", True, 1.0)]


def test_the_class_is_of_the_file_beside_the_problems_whatever_others_are_called(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in ("first", "second"):
        own = folder / name
        own.mkdir()
        (own / "games.py").write_text(GAME.replace("0 to {self.most}", name))
        (item,) = load_items("environment", written(own, "use: games.py:Guess\ncount: 1\n"))
        assert item.text == f"{name}: "
        environment = item.answer.environment() if isinstance(item.answer, EnvironmentAnswer) else None
        assert environment is not None and asyncio.run(environment.reset({})).text == item.text


def test_rows_of_seeds_are_told_apart(folder: Path) -> None:
    items = load_items("environment", written(folder, f"use: {folder}/games.py:Guess\ncount: 3\nseed: 5\n"))
    assert [json.loads(item.answer.text) for item in items] == [{"seed": 5}, {"seed": 6}, {"seed": 7}]
    assert len({item.id for item in items}) == 3


@each_case(
    ("text", "told"),
    [
        ("use: games.py:Guess\n", "give either rows, a file, or count"),
        ("use: nowhere.py:Guess\ncount: 1\n", "use: there is no file nowhere.py"),
        ("use: {folder}/games.py:Gess\ncount: 1\n", "^.*game.yaml: use: .*has no 'Gess'"),
        ("use: {folder}/games.py:Guess\nrows: numbers.jsonl\n", "rows: there is no file .*numbers.jsonl"),
        ("use: json:dumps\ncount: 1\n", "no class with the methods"),
        ("use: {folder}/games.py:Guess\noptions: {{most: 2}}\nrows: rows.jsonl\n", "begin .ValueError: too large"),
        ("use: {folder}/games.py:Text\ncount: 1\n", "reset returned str, which is no megasharp"),
        ("use: {folder}/games.py:Mute\ncount: 1\n", "begins with neither a text nor messages"),
    ],
)
def test_what_is_wrong_is_told(folder: Path, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_items("environment", written(folder, text.format(folder=folder)))


@each_case("path", NAMED.values())
def test_adapters_are_environments_by_their_short_names(path: str) -> None:
    kind = imported(path)
    assert isinstance(kind, type) and issubclass(kind, Environment)
