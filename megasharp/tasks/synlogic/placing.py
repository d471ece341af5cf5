"""SynLogic's grids on which things are placed: campsite, minesweeper, norinori, star placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megasharp.tasks.synlogic.finding import last_value
from megasharp.tasks.synlogic.game import SIDES, Check, Finding, Game, GameError, Place, shape, spelled
from megasharp.tasks.synlogic.literals import UnreadableError, read_literal, whole_numbers, words

_AROUND = (*SIDES, (1, 1), (1, -1), (-1, 1), (-1, -1))


def _touch(places: set[Place], around: Iterable[Place]) -> bool:
    """Return True where one of the places has another beside it."""
    return any((row + down, column + right) in places for row, column in places for down, right in around)


def campsite(game: Game) -> Check:
    """As many tents `C` as trees `T`, each beside a tree of its own, none touching another."""
    given = game.grid("grid")
    rows, columns = game.wholes("row_constraints"), game.wholes("col_constraints")
    if shape(given) != [len(columns)] * len(rows):
        raise GameError("metadata's 'grid' must have a row and a column for each of its constraints")
    trees = {(r, c) for r, row in enumerate(given) for c, cell in enumerate(row) if cell == "T"}

    def check(text: str) -> Finding:
        grid = last_value(text, lambda written: words(read_literal(written)))
        tents = {(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell == "C"}
        right = (
            shape(grid) == shape(given)
            and {(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell == "T"} == trees
            and [sum(r == row for row, _ in tents) for r in range(len(rows))] == rows
            and [sum(c == column for _, column in tents) for c in range(len(columns))] == columns
            and not _touch(tents, _AROUND)
            and _each_has_its_own(tents, trees)
        )
        return Finding(spelled(grid), right)

    return check


def _each_has_its_own(tents: set[Place], trees: set[Place]) -> bool:
    """A perfect matching of tents and trees side by side, by augmenting paths."""
    tent_of: dict[Place, Place] = {}

    def matched(tent: Place, tried: set[Place]) -> bool:
        for down, right in SIDES:
            tree = tent[0] + down, tent[1] + right
            if tree in trees and tree not in tried:
                tried.add(tree)
                if tree not in tent_of or matched(tent_of[tree], tried):
                    tent_of[tree] = tent
                    return True
        return False

    return len(tents) == len(trees) and all(matched(tent, set()) for tent in tents)


def minesweeper(game: Game) -> Check:
    """The cells that must hold mines, counted from 0, in any order."""
    try:
        mines = set(_places(game.field("current_mines")))
    except UnreadableError as error:
        raise GameError("metadata's 'current_mines' must be pairs of numbers") from error

    def check(text: str) -> Finding:
        found = last_value(text, lambda written: _places(read_literal(written)), listed=True)
        return Finding(" ".join(f"{r},{c}" for r, c in sorted(set(found))), set(found) == mines)

    return check


def _places(value: object) -> list[Place]:
    """Pairs of whole numbers; one pair alone is one place, and an empty list none."""
    if value == []:
        return []
    single = isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) for each in value)
    pairs = whole_numbers([value] if single else value)
    if any(len(pair) != 2 for pair in pairs):
        raise UnreadableError("not pairs of numbers")
    return [(row, column) for row, column in pairs]


def norinori(game: Game) -> Check:
    """Dominoes, none beside another, that cover two cells of every region and all cells marked `X`; places from 1.

    SynLogic's checker passes over regions that no domino touches; its rule says "each region", and so do we.
    """
    regions = game.grid("region_grid")
    region = {(r, c): cell for r, row in enumerate(regions, 1) for c, cell in enumerate(row, 1)}
    wanted = Counter({cell: 2 for cell in region.values() if cell != "X"})

    def check(text: str) -> Finding:
        dominoes = last_value(text, lambda written: _dominoes(read_literal(written)), listed=True)
        cover = [place for domino in dominoes for place in domino]
        covered = Counter(region.get(place, "") for place in cover)
        shaded = sum(cell == "X" for cell in region.values())
        right = (
            len(set(cover)) == len(cover)
            and all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in dominoes)
            and not any(
                abs(a[0] - b[0]) + abs(a[1] - b[1]) <= 1
                for at, one in enumerate(dominoes)
                for other in dominoes[:at]
                for a in one
                for b in other
            )
            and covered == wanted + Counter({"X": shaded})
        )
        return Finding(" ".join(f"{a[0]},{a[1]}-{b[0]},{b[1]}" for a, b in sorted(dominoes)), right)

    return check


def _dominoes(value: object) -> list[tuple[Place, Place]]:
    pairs = [_places(each) for each in value] if isinstance(value, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise UnreadableError("not a list of pairs of places")
    return [(min(pair), max(pair)) for pair in pairs]


def star_placement_puzzle(game: Game) -> Check:
    """`k` stars in each row, column and region, none touching another; a table of regions and places from 1."""
    regions, count, size = game.grid("region_grid"), game.whole("k"), game.whole("n")
    if shape(regions) != [size] * size:
        raise GameError("metadata's 'region_grid' must have 'n' rows of 'n'")
    region = {(r, c): cell for r, row in enumerate(regions, 1) for c, cell in enumerate(row, 1)}

    def check(text: str) -> Finding:
        stars = set(last_value(text, _stars))
        right = (
            stars <= region.keys()
            and [sum(r == row for row, _ in stars) for r in range(1, size + 1)] == [count] * size
            and [sum(c == column for _, column in stars) for c in range(1, size + 1)] == [count] * size
            and Counter(region[star] for star in stars) == dict.fromkeys(set(region.values()), count)
            and not _touch(stars, _AROUND)
        )
        return Finding(" ".join(f"{r},{c}" for r, c in sorted(stars)), right)

    return check


def _stars(text: str) -> list[Place]:
    table = read_literal(text)
    if not isinstance(table, dict):
        raise UnreadableError("not a table of regions")
    return [place for places in table.values() for place in _places(places)]
