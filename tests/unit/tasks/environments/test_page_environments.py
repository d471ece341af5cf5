"""The page on environments: its class plays, and its files are read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from page_code import titled_blocks

from megasharp.tasks.environment import EnvironmentAnswer, Observation
from megasharp.tasks.table import load_items


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in titled_blocks("environments.md").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "numbers.jsonl").write_text('{"number": 7}\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_own_class_is_played(folder: Path) -> None:
    (item,) = load_items("environment", folder / "game.yaml")
    assert item.text == "Guess a number from 0 to 9: " and isinstance(item.answer, EnvironmentAnswer)
    environment = item.answer.environment()

    async def play() -> list[Observation]:
        await environment.reset(item.answer.row)
        return [await environment.step(action) for action in ("5", " 7 ")]

    assert [(one.reward, one.done) for one in asyncio.run(play())] == [(0.0, False), (1.0, True)]


def test_its_files_for_other_packages_are_read(folder: Path) -> None:
    for name, told in (("lake.yaml", "[S]FFF"), ("sums.yaml", "<answer>")):
        text = (folder / name).read_text()
        assert "count: 500" in text
        (folder / name).write_text(text.replace("count: 500", "count: 2"))
        first, second = load_items("environment", folder / name)
        assert told in first.turns[0][1] and first.id != second.id
