"""Mazes to walk through by turns, with several shortest ways each: a game in which strategies can be counted.

A maze is a grid of free squares and walls, with a start and a goal. A prompt is the rows, one behind the other, with
the walls as `#`, the start as `S` and the goal as `G`: `S..#/.#../...G:`. A turn is one move or several, `u`, `d`, `l`
and `r`; the answer is the square where the walker stands then, as row and column, each from 0: `12:`. A move into a
wall or over the edge is not made, the rest of its turn is left out, and the answer ends with `!` instead.

The maze is solved where the walker comes to the goal in as few moves as possible, moves into walls counted too. The
canonical answer is the moves, so distinct correct answers are distinct shortest ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from megasharp.common.errors import UserError
from megasharp.tasks.data_fields import check_names, read_objects, text_field
from megasharp.tasks.environment import Environment, EnvironmentAnswer, Observation, Row
from megasharp.tasks.judge import TaskItem

Square = tuple[int, int]
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
WALL, START, GOAL, FREE = "#", "S", "G", "."
BETWEEN, END = "/", ":"


@dataclass(frozen=True, slots=True)
class Maze:
    """A maze as a prompt has it, without the end sign.

    Example: `Maze("S..#/.#../...G")`.
    """

    text: str

    @property
    def rows(self) -> list[str]:
        """The grid's rows."""
        return self.text.split(BETWEEN)

    def find(self, sign: str) -> Square:
        """The first square with this sign."""
        return next((r, c) for r, row in enumerate(self.rows) for c, each in enumerate(row) if each == sign)

    def step(self, square: Square, move: str) -> Square | None:
        """The square after a move; None where a wall or the edge is in the way."""
        row, column = square[0] + MOVES[move][0], square[1] + MOVES[move][1]
        rows = self.rows
        if 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != WALL:
            return row, column
        return None


@lru_cache(maxsize=1 << 14)
def ways_to_goal(maze: Maze) -> Mapping[Square, tuple[int, int]]:
    """Return for each square the moves of a shortest way to the goal, and the number of such ways.

    A square from which there is none is left out.
    """
    goal = maze.find(GOAL)
    found, waiting = {goal: (0, 1)}, deque([goal])
    while waiting:
        square = waiting.popleft()
        moves, ways = found[square]
        # What leads here also leads back.
        for before in filter(None, (maze.step(square, move) for move in MOVES)):
            if before not in found:
                found[before] = (moves + 1, 0)
                waiting.append(before)
            if found[before][0] == moves + 1:
                found[before] = (moves + 1, found[before][1] + ways)
    return found


def shortest(maze: Maze) -> tuple[int, int]:
    """Return the moves of a shortest way, and the number of such ways; (0, 0) where there is none."""
    return ways_to_goal(maze).get(maze.find(START), (0, 0))


def make_maze(rng: Random, size: int = 4, walls: int = 2, ways: tuple[int, int] = (3, 20)) -> Maze:
    """Draw a maze of `size` x `size` squares whose number of shortest ways is within `ways`."""
    while True:
        signs = [FREE] * (size * size - walls - 2) + [WALL] * walls + [START, GOAL]
        rng.shuffle(signs)
        rows = ("".join(signs[row * size : (row + 1) * size]) for row in range(size))
        maze = Maze(BETWEEN.join(rows))
        if ways[0] <= shortest(maze)[1] <= ways[1]:
            return maze


class Walk(Environment):
    """One walk through a maze."""

    async def reset(self, row: Row) -> Observation:
        """Stand at the start."""
        self._maze = Maze(str(row["maze"]))
        self.square = self._maze.find(START)
        self._moves = ""
        return Observation(self._maze.text + END)

    async def step(self, action: str) -> Observation:
        """Move; the episode ends at the goal, or with as many moves as a shortest way has."""
        blocked = not action or not set(action) <= MOVES.keys()
        for move in "" if blocked else action:
            self._moves += move
            following = self._maze.step(self.square, move)
            if blocked := following is None:
                break
            assert following is not None
            self.square = following
            if self.square == self._maze.find(GOAL):
                break
        most, _ = shortest(self._maze)
        solved = self.square == self._maze.find(GOAL) and len(self._moves) <= most
        done = solved or len(self._moves) >= most
        info = {"correct": solved, "answer": self._moves}
        return Observation(
            f"{self.square[0]}{self.square[1]}{'!' if blocked else END}", reward=float(solved), done=done, info=info
        )


@dataclass(frozen=True, slots=True)
class MazeAnswer(EnvironmentAnswer):
    """A maze, which is all that a walk needs.

    Example: `MazeAnswer("S..#/.#../...G")`.
    """

    text: str

    @property
    def row(self) -> Row:
        """The maze."""
        return {"maze": self.text}

    def environment(self) -> Environment:
        """A walk that has not begun."""
        return Walk()

    @property
    def solutions(self) -> int:
        """The number of shortest ways."""
        return shortest(Maze(self.text))[1]


def _checked(text: str, where: str) -> Maze:
    rows = text.split(BETWEEN)
    signs = text.replace(BETWEEN, "")
    if len({*map(len, rows)}) > 1 or not set(signs) <= {WALL, START, GOAL, FREE}:
        raise UserError(f"{where}: 'maze' must be rows of equal length of . # S G with {BETWEEN} between, got {text!r}")
    if max(len(rows), len(rows[0])) > 10:
        raise UserError(f"{where}: 'maze' must have at most 10 rows and columns, whose numbers are single digits")
    if signs.count(START) != 1 or signs.count(GOAL) != 1 or not shortest(Maze(text))[1]:
        raise UserError(f"{where}: 'maze' must have one S, one G, and a way from one to the other, got {text!r}")
    return Maze(text)


def read_mazes(path: Path) -> Iterator[tuple[str, Maze]]:
    """Read a JSONL file of mazes, objects with `id` and `maze`. Raises UserError, naming the line, for a bad one."""
    rows = read_objects(path, "make one with tools/make_maze_data.py")
    check_names([text_field(fields, "id", where) for where, fields in rows], path)
    for where, fields in rows:
        yield text_field(fields, "id", where), _checked(text_field(fields, "maze", where), where)


def load_items(path: Path) -> list[TaskItem]:
    """Load the mazes of a file. Raises UserError as `read_mazes`."""
    return [
        TaskItem(name, "maze", maze.text + END, MazeAnswer(maze.text), path.name) for name, maze in read_mazes(path)
    ]
