"""Games of all tasks, with their solutions: by SynLogic's generators, or built here (`built.py`)."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from synlogic_peer import solutions
from synlogic_peer.built import BUILDERS
from synlogic_peer.peer import Peer

Data = Mapping[str, Any]

# Solutions of one puzzle that are used.
MOST_SOLUTIONS = 3


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A game's data, and the solutions of it that are known, as Python values."""

    task: str
    data: dict[str, Any]
    solutions: tuple[Any, ...]


def _field(name: str) -> Callable[[Data], Iterator[Any]]:
    return lambda data: iter([data["metadata"][name]])


def _number(data: Data) -> Iterator[int]:
    yield int(data["answer"])


def _text(data: Data) -> Iterator[str]:
    yield str(data["answer"])


def _listed(data: Data) -> Iterator[list[str]]:
    yield re.split(r"\s*[,\uff0c]\s*", data["answer"])


def _literal(data: Data) -> Iterator[Any]:
    yield ast.literal_eval(data["answer"]) if isinstance(data["answer"], str) else data["answer"]


def _stars(data: Data) -> Iterator[dict[str, list[tuple[int, int]]]]:
    stars: dict[str, list[tuple[int, int]]] = {}
    for line in data["answer"].strip("[]").split():
        stars[line[0]] = [(int(r), int(c)) for r, c in re.findall(r"\((\d+),(\d+)\)", line)]
    yield stars


def _first_error(data: Data) -> Iterator[int]:
    """None for a broken sequence whose first error the generator does not know: its answer is the text `None`."""
    place = -1 if data["metadata"]["is_valid"] else data["metadata"]["first_error_pos"]
    yield from [] if place is None else [place]


def _wrong_thoughts(data: Data) -> Iterator[list[str]]:
    yield [str(each) for each in data["metadata"]["error_indices"]]


# For each task: the generator's class and options, and how its solutions are found.
SOURCES: dict[str, tuple[str, dict[str, Any], Callable[[Data], Iterator[Any]]]] = {
    "arrow_maze": ("ArrowMaze", {}, _field("solution")),
    "boolean_expressions": ("BooleanExpressions", {}, _listed),
    "campsite": ("Campsite", {}, _field("solution")),
    "dyck_language": ("DyckLanguage", {}, _text),
    "dyck_language_errors": ("DyckLanguageErrors", {}, _first_error),
    "dyck_language_reasoning_errors": ("DyckLanguageReasoningErrors", {}, _wrong_thoughts),
    "goods_exchange": ("GoodsExchange", {}, _literal),
    "kukurasu": (
        "Kukurasu",
        {},
        lambda data: solutions.kukurasu(data["metadata"]["row_sums"], data["metadata"]["col_sums"]),
    ),
    "math_path": (
        "MathPath",
        {},
        lambda data: chain(_text(data), solutions.digits(data["metadata"]["query_expr"])),
    ),
    "mathador": (
        "GameOf24",
        {},
        lambda data: solutions.expressions(data["metadata"]["numbers"], data["metadata"]["operators"], 24),
    ),
    "minesweeper": (
        "Minesweeper",
        {"n": 6},
        lambda data: iter([[tuple(mine) for mine in data["metadata"]["current_mines"]]]),
    ),
    "number_wall": ("NumberWall", {"n": 4}, _field("solution")),
    "numbrix": ("Numbrix", {}, _field("solution")),
    "object_counting": ("ObjectCounting", {}, _number),
    "operation": ("Operation", {}, _text),
    "skyscraper_puzzle": ("SkyscraperPuzzle", {}, _field("solved_grid")),
    "space_reasoning": ("SpaceReasoning", {}, _text),
    "space_reasoning_tree": ("SpaceReasoningTree", {"min_nodes": 12, "max_nodes": 30}, _listed),
    "star_placement_puzzle": ("StarPlacementPuzzle", {"n": 5}, _stars),
    "sudoku": ("Sudoku", {}, _literal),
    "survo": ("Survo", {}, _literal),
    "time_sequence": ("TimeSequence", {}, _literal),
    "web_of_lies": ("WebOfLies", {}, _listed),
}
FOLDERS = {"mathador": "game_of_24"}


def puzzles(task: str, count: int, seed: int, peer: Peer) -> list[Puzzle]:
    """Games of a task. Raises RuntimeError where the published generator fails."""
    rng = random.Random(f"{seed} {task}")
    if task in BUILDERS:
        made = [BUILDERS[task](rng) for _ in range(count)]
        return [Puzzle(task, data, tuple(some)) for data, some in made]
    name, options, solved = SOURCES[task]
    folder = FOLDERS.get(task, task)
    games = peer.generate(f"games.tasks.{folder}.scripts.{folder}", name, options, count, seed)
    found = (Puzzle(task, game, tuple(islice(solved(game), MOST_SOLUTIONS))) for game in games)
    return [puzzle for puzzle in found if puzzle.solutions]
