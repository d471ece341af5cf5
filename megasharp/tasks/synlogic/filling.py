"""SynLogic's grids that are filled by a rule: arrow maze, kukurasu, number wall, numbrix, survo, wordscapes."""

from __future__ import annotations

from collections.abc import Callable

from megasharp.tasks.synlogic.finding import last_value, last_whole_numbers
from megasharp.tasks.synlogic.game import SIDES, Check, Finding, Game, GameError, Grid, Numbers, Place, shape, spelled
from megasharp.tasks.synlogic.literals import read_literal, words

ARROWS = {
    "↑": (-1, 0),
    "↓": (1, 0),
    "←": (0, -1),
    "→": (0, 1),
    "↖": (-1, -1),
    "↗": (-1, 1),
    "↘": (1, 1),
    "↙": (1, -1),
}


def _filled(shape_of: list[int], rule: Callable[[Grid], bool]) -> Check:
    """Make a checker of grids of a shape that obey a rule."""

    def check(text: str) -> Finding:
        grid = last_value(text, lambda written: words(read_literal(written)))
        return Finding(spelled(grid), shape(grid) == shape_of and rule(grid))

    return check


def _flat(grid: Grid) -> list[str]:
    return [cell for row in grid for cell in row]


def _rectangle(game: Game, name: str) -> Grid:
    grid = game.grid(name)
    if len(set(shape(grid))) != 1:
        raise GameError(f"metadata's {name!r} must have rows of one length")
    return grid


def arrow_maze(game: Game) -> Check:
    """Arrows in every empty cell: each stands in a ray that leaves a number, whose rays hold as many arrows as it says.

    A number's ray goes on in one of eight directions as long as the arrows point that way. `X` is an empty cell.
    """
    maze = _rectangle(game, "maze")

    def rule(grid: Grid) -> bool:
        for given, cell in zip(_flat(maze), _flat(grid), strict=True):
            if (given != "X" and cell != given) or (given == "X" and cell not in ARROWS):
                return False
        covered: set[Place] = set()
        for row, cells in enumerate(grid):
            for column, cell in enumerate(cells):
                if cell.isdigit():
                    rays = _rays(grid, row, column)
                    if len(rays) != int(cell):
                        return False
                    covered |= rays
        return all((r, c) in covered for r, cells in enumerate(grid) for c, cell in enumerate(cells) if cell in ARROWS)

    return _filled(shape(maze), rule)


def _rays(grid: Grid, row: int, column: int) -> set[Place]:
    found: set[Place] = set()
    for arrow, (down, right) in ARROWS.items():
        r, c = row + down, column + right
        while 0 <= r < len(grid) and 0 <= c < len(grid[0]) and grid[r][c] == arrow:
            found.add((r, c))
            r, c = r + down, c + right
    return found


def kukurasu(game: Game) -> Check:
    """`1` or `X` in each cell; a row's sum is of the places of its ones, from 1, and so is a column's."""
    rows, columns = game.wholes("row_sums"), game.wholes("col_sums")
    if (len(rows), len(columns)) != (game.whole("n"), game.whole("m")):
        raise GameError("metadata's 'row_sums' and 'col_sums' must be as many as 'n' and 'm'")

    def rule(grid: Grid) -> bool:
        return all(cell in ("1", "X") for row in grid for cell in row) and all(
            [sum(at for at, cell in enumerate(line, start=1) if cell == "1") for line in lines] == sums
            for lines, sums in ((grid, rows), (list(zip(*grid, strict=True)), columns))
        )

    return _filled([len(columns)] * len(rows), rule)


def number_wall(game: Game) -> Check:
    """Walls `A` part islands, each of one number that says its size; no square of four walls, no islands at a corner.

    Two islands that touch only at a corner, with walls at the two other cells, are refused, as SynLogic does.
    """
    given = _rectangle(game, "grid")

    def rule(grid: Grid) -> bool:
        for before, cell in zip(_flat(given), _flat(grid), strict=True):
            if (before.isdigit() and cell != before) or not (cell in ("X", "A") or cell.isdigit()):
                return False
        return _walls_are_thin(grid) and _islands_are_right(grid)

    return _filled(shape(given), rule)


def _walls_are_thin(grid: Grid) -> bool:
    """No 2 x 2 cells of walls, and none with walls at one diagonal alone whose other cells are of two islands."""
    island = _islands(grid)
    for row in range(len(grid) - 1):
        for column in range(len(grid[0]) - 1):
            falling = island.get((row, column)), island.get((row + 1, column + 1))
            rising = island.get((row, column + 1)), island.get((row + 1, column))
            if falling == rising == (None, None):
                return False
            for one, other in ((falling, rising), (rising, falling)):
                if other == (None, None) and None not in one and one[0] != one[1]:
                    return False
    return True


def _islands(grid: Grid) -> dict[Place, int]:
    """Number the islands: for each cell but walls, the number of its island."""
    island: dict[Place, int] = {}
    for row in range(len(grid)):
        for column in range(len(grid[0])):
            if grid[row][column] != "A" and (row, column) not in island:
                number, waiting = len(set(island.values())), [(row, column)]
                while waiting:
                    r, c = waiting.pop()
                    inside = 0 <= r < len(grid) and 0 <= c < len(grid[0])
                    if inside and grid[r][c] != "A" and (r, c) not in island:
                        island[r, c] = number
                        waiting += [(r + down, c + right) for down, right in SIDES]
    return island


def _islands_are_right(grid: Grid) -> bool:
    places: dict[int, list[Place]] = {}
    for place, number in _islands(grid).items():
        places.setdefault(number, []).append(place)
    numbers = ([grid[r][c] for r, c in some if grid[r][c].isdigit()] for some in places.values())
    return all(
        len(said) == 1 and int(said[0]) == len(some) for said, some in zip(numbers, places.values(), strict=True)
    )


def numbrix(game: Game) -> Check:
    """1 to n times n, each number beside the next one, the given ones kept."""
    given = _rectangle(game, "grid")
    last = len(given) * len(given[0])

    def check(text: str) -> Finding:
        grid = last_whole_numbers(text)
        place = {number: (r, c) for r, row in enumerate(grid) for c, number in enumerate(row)}
        right = (
            shape(grid) == shape(given)
            and sorted(place) == list(range(1, last + 1))
            and all(cell in ("X", str(grid[r][c])) for r, row in enumerate(given) for c, cell in enumerate(row))
            and all(
                abs(place[n][0] - place[n + 1][0]) + abs(place[n][1] - place[n + 1][1]) == 1 for n in range(1, last)
            )
        )
        return Finding(spelled(grid), right)

    return check


def survo(game: Game) -> Check:
    """Zeros are replaced by the candidate numbers; the last row and column hold the sums."""
    given = game.numbers("original_matrix")
    size, candidates = game.whole("n"), sorted(game.wholes("candidate_numbers"))
    if shape(given) != [size] * size:
        raise GameError("metadata's 'original_matrix' must have 'n' rows of 'n'")

    def rule(grid: Numbers) -> bool:
        pairs = [pair for rows in zip(given, grid, strict=True) for pair in zip(*rows, strict=True)]
        return (
            all(before in (0, number) for before, number in pairs)
            and sorted(number for before, number in pairs if before == 0) == candidates
            and all(
                sum(line[:-1]) == line[-1] for lines in (grid, list(zip(*grid, strict=True))) for line in lines[:-1]
            )
        )

    def check(text: str) -> Finding:
        grid = last_whole_numbers(text)
        return Finding(spelled(grid), shape(grid) == shape(given) and rule(grid))

    return check


def wordscapes(game: Game) -> Check:
    """A letter where the grid says `X`, nothing where it says `0`; each word stands in a row, or in a column.

    SynLogic's checker joins what the cells hold, be they letters or words; its prompt asks for letters, and so do we.
    """
    layout = _rectangle(game, "grid")
    across, down = ([word.lower() for word in game.texts(name) if word] for name in ("across_words", "down_words"))

    def check(text: str) -> Finding:
        grid = last_value(text, lambda written: words(read_literal(written)))
        blank = [["" if cell.strip() in ("", "0") else cell.strip().lower() for cell in row] for row in grid]
        if shape(grid) != shape(layout):
            return Finding(spelled(grid), False)
        fits = all(
            len(cell) <= 1 and (bool(cell) == (wanted == "X") or wanted not in ("X", "0"))
            for wanted, cell in zip(_flat(layout), _flat(blank), strict=True)
        )
        rows, columns = ["".join(row) for row in blank], ["".join(column) for column in zip(*blank, strict=True)]
        right = fits and all(
            any(word in line for line in lines) for some, lines in ((across, rows), (down, columns)) for word in some
        )
        return Finding(spelled([[cell or "0" for cell in row] for row in blank]), right)

    return check
