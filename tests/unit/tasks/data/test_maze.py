"""Mazes: ways and rewards against every walk there is, and what is wrong with a file."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from random import Random

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.maze import BETWEEN, MazeAnswer, Walk, make_maze, shortest
from megasharp.tasks.table import load_items

# For each move, rows down and columns to the right.
DOWN_RIGHT = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


def arrives(text: str, moves: str) -> bool:
    """Walk on the rows themselves, and say whether the last move, and none before it, comes to the goal."""
    grid = {(r, c): sign for r, row in enumerate(text.split(BETWEEN)) for c, sign in enumerate(row)}
    square = next(at for at, sign in grid.items() if sign == "S")
    for number, move in enumerate(moves, 1):
        square = (square[0] + DOWN_RIGHT[move][0], square[1] + DOWN_RIGHT[move][1])
        if grid.get(square, "#") == "#" or (grid[square] == "G") != (number == len(moves)):
            return False
    return True


def by_trial(text: str) -> set[str]:
    """All shortest ways, found by trying every walk of one move, of two, and so on."""
    for length in range(1, 8):
        if ways := {walk for walk in map("".join, product("udlr", repeat=length)) if arrives(text, walk)}:
            return ways
    raise AssertionError(text)


async def reward_of(text: str, turns: list[str]) -> float:
    walk = Walk()
    await walk.reset({"maze": text})
    return sum([(await walk.step(turn)).reward for turn in turns])


def test_ways_are_those_that_trial_finds() -> None:
    for seed in range(12):
        maze = make_maze(Random(seed), size=3, walls=1, ways=(1, 6))
        ways = by_trial(maze.text)
        assert shortest(maze) == (len(min(ways)), len(ways)), maze
        assert MazeAnswer(maze.text).solutions == len(ways)


def test_only_shortest_ways_are_worth_something_however_they_are_divided_into_turns() -> None:
    text = "S../.#./..G"
    ways = by_trial(text)
    assert ways == {"rrdd", "ddrr"}
    for walk in map("".join, product("udlr", repeat=4)):
        assert asyncio.run(reward_of(text, [walk])) == asyncio.run(reward_of(text, [*walk])) == float(walk in ways)


@each_case(
    ("turns", "said"),
    [
        (["r"], (0.0, False, "01:")),
        (["rd"], (0.0, False, "01!")),
        (["u"], (0.0, False, "00!")),
        (["x"], (0.0, False, "00!")),
        ([""], (0.0, False, "00!")),
        (["rr", "dd"], (1.0, True, "22:")),
        (["u", "rr", "d", "d"], (0.0, True, "12:")),
        (["r", "l", "r", "l"], (0.0, True, "00:")),
    ],
)
def test_what_a_maze_answers(turns: list[str], said: tuple[float, bool, str]) -> None:
    """A move into a wall counts, so that whoever makes one cannot arrive in as few moves any more."""
    reward, done, text = 0.0, False, ""
    walk = Walk()
    asyncio.run(walk.reset({"maze": "S../.#./..G"}))
    for turn in turns:
        if not done:
            observation = asyncio.run(walk.step(turn))
            reward, done, text = reward + observation.reward, observation.done, observation.text
    assert (reward, done, text) == said


@each_case(
    ("maze", "message"),
    [
        ("S./.G.", "rows of equal length"),
        ("S./xG", "rows of equal length"),
        ("S./.S", "one S, one G"),
        ("S#/#G", "a way from one to the other"),
    ],
)
def test_a_wrong_maze_is_refused_by_its_line(maze: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mazes.jsonl"
    file.write_text(f'{{"id": "a", "maze": "{maze}"}}\n')
    with pytest.raises(UserError, match=f"mazes.jsonl:1: .*{message}"):
        load_items("maze", file)
