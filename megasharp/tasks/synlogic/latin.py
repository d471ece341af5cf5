"""SynLogic's squares in which each row and column holds 1 to n once: sudoku, futoshiki, calcudoko, skyscrapers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

from megasharp.tasks.synlogic.finding import last_whole_numbers
from megasharp.tasks.synlogic.game import Check, Finding, Game, GameError, Numbers, Place, spelled

_CELL = re.compile(r"\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_BOX = 3


def _square(size: int, rule: Callable[[Numbers], bool]) -> Check:
    """Make a checker of Latin squares of a size that obey one more rule."""
    every = list(range(1, size + 1))

    def check(text: str) -> Finding:
        grid = last_whole_numbers(text)
        square = len(grid) == size and all(len(row) == size for row in grid)
        latin = square and all(sorted(line) == every for line in (*grid, *zip(*grid, strict=True)))
        return Finding(spelled(grid), latin and rule(grid))

    return check


def sudoku(game: Game) -> Check:
    """Nine numbers in each row, column and box of three by three, the given ones kept."""
    given = game.grid("original_sudoku")
    if len(given) != _BOX**2 or any(len(row) != _BOX**2 for row in given):
        raise GameError("metadata's 'original_sudoku' must have 9 rows of 9")
    kept = _given(given, empty={"0", "X", "x"})

    def rule(grid: Numbers) -> bool:
        boxes = (
            {grid[top + row][left + column] for row in range(_BOX) for column in range(_BOX)}
            for top in range(0, _BOX**2, _BOX)
            for left in range(0, _BOX**2, _BOX)
        )
        return all(len(box) == _BOX**2 for box in boxes) and all(grid[r][c] == number for (r, c), number in kept)

    return _square(_BOX**2, rule)


def _given(grid: Sequence[Sequence[str]], empty: set[str]) -> list[tuple[Place, int]]:
    try:
        return [((r, c), int(cell)) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell not in empty]
    except ValueError as error:
        raise GameError("a given cell is no number") from error


def futoshiki(game: Game) -> Check:
    """A Latin square that keeps its given numbers and whose inequalities hold.

    The given numbers stand in the question alone, after "Current puzzle:", `X` where there is none.
    """
    size = game.whole("grid_size")
    lines, cell = [line.split() for line in game.question.splitlines()], re.compile(r"X|\d+")
    puzzle = [line for line in lines if len(line) == size and all(map(cell.fullmatch, line))]
    if len(puzzle) != size:
        raise GameError(f"the question has no puzzle of {size} rows of {size}")
    kept = _given(puzzle, empty={"X"})
    pairs = [_inequality(written, size) for written in _listed(game, "constraints")]

    def rule(grid: Numbers) -> bool:
        return all(grid[r][c] == number for (r, c), number in kept) and all(
            grid[large[0]][large[1]] > grid[small[0]][small[1]] for large, small in pairs
        )

    return _square(size, rule)


def _inequality(written: object, size: int) -> tuple[Place, Place]:
    """Two places, the larger number's first."""
    match written:
        case [[int(a), int(b)], [int(c), int(d)], "<" | ">" as sign] if max(a, b, c, d) < size and min(a, b, c, d) >= 0:
            return ((a, b), (c, d)) if sign == ">" else ((c, d), (a, b))
    raise GameError("metadata's 'constraints' must be triples of two places in the grid and a sign")


def calcudoko(game: Game) -> Check:
    """A Latin square whose regions, of different numbers each, give their targets by +, -, * or ÷."""
    size = game.whole("grid_size")
    regions = [_region(written, size) for written in _listed(game, "regions")]

    def rule(grid: Numbers) -> bool:
        return all(
            len(set(numbers)) == len(numbers) and _gives(numbers, operator, target)
            for places, operator, target in regions
            if (numbers := [grid[r][c] for r, c in places])
        )

    return _square(size, rule)


def _region(written: object, size: int) -> tuple[list[Place], str, int]:
    match written:
        case {"cells": [*cells], "target": int(target), "operator": str(operator)}:
            found = [_CELL.fullmatch(str(cell)) for cell in cells]
            places = [(int(cell[1]) - 1, int(cell[2]) - 1) for cell in found if cell]
            if places and len(places) == len(cells) and all(0 <= at < size for place in places for at in place):
                return places, operator, target
    raise GameError("metadata's 'regions' must have 'cells' as (row,column), a 'target' and an 'operator'")


def _gives(numbers: list[int], operator: str, target: int) -> bool:
    if operator == "+":
        return sum(numbers) == target
    if operator == "*":
        return prod(numbers) == target
    if len(numbers) != 2:
        return False
    small, large = sorted(numbers)
    return large - small == abs(target) if operator == "-" else large == small * target


def skyscraper_puzzle(game: Game) -> Check:
    """A Latin square of heights; the clue at each end of a line says how many can be seen from there."""
    size = game.whole("n")
    clues = [game.wholes(side) for side in ("top", "bottom", "left", "right")]
    if any(len(side) != size for side in clues):
        raise GameError(f"metadata's 'top', 'bottom', 'left' and 'right' must have {size} numbers each")
    top, bottom, left, right = clues

    def rule(grid: Numbers) -> bool:
        columns = [list(column) for column in zip(*grid, strict=True)]
        return all(
            [_seen(line) for line in lines] == first and [_seen(line[::-1]) for line in lines] == last
            for lines, first, last in ((columns, top, bottom), (grid, left, right))
        )

    return _square(size, rule)


def _seen(heights: list[int]) -> int:
    return sum(height > max(heights[:before], default=0) for before, height in enumerate(heights))


def _listed(game: Game, name: str) -> list[object]:
    value = game.field(name)
    if not isinstance(value, list):
        raise GameError(f"metadata's {name!r} must be a list")
    return value
