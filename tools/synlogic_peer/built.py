"""Games that are built from a solution, for tasks whose published generators take minutes, need data, or are none."""

from __future__ import annotations

import json
import random
from typing import Any

from synlogic_peer.solutions import latin

Game = tuple[dict[str, Any], list[Any]]

_SIZE = 4
_SQUARES = list(latin(_SIZE))
_WORDS = (
    "amber anchor apple arrow basil beacon birch bottle candle canyon cedar cobalt copper dragon ember falcon fennel "
    "garnet ginger harbor hazel indigo island jasper juniper kettle lantern lemon maple marble nectar ocean olive "
    "orchid pepper pillar quartz raven ribbon saffron silver tango timber tulip umber velvet violet walnut "
    "willow zephyr"
)


def _data(answer: Any = "", question: str = "", **metadata: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, "metadata": metadata}


def arc_agi(rng: random.Random) -> Game:
    """A grid of colours; no rule leads to it, as the checkers know none."""
    grid = [[rng.randrange(10) for _ in range(_SIZE)] for _ in range(3)]
    return _data(grid), [grid]


def zebra_puzzle(rng: random.Random) -> Game:
    """Houses with their owners' nation, drink and pet."""
    kinds = {"Nation": ["Dane", "Brit", "Swede"], "Drink": ["tea", "milk", "beer"], "Pet": ["dog", "bird", "cat"]}
    columns = {kind: rng.sample(values, 3) for kind, values in kinds.items()}
    table = {f"House {at + 1}": {kind: column[at] for kind, column in columns.items()} for at in range(3)}
    return _data(json.dumps(table)), [table]


def _two_squares(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Two Latin squares that differ in a few rows only, so that puzzles can be made that both of them solve."""
    one = rng.choice(_SQUARES)
    near = [each for each in _SQUARES if 1 <= sum(a != b for a, b in zip(one, each, strict=True)) <= 2]
    return one, rng.choice(near)


def futoshiki(rng: random.Random) -> Game:
    """Given numbers and inequalities that hold in two squares; each row has an empty cell."""
    one, other = _two_squares(rng)
    places = [(row, column) for row in range(_SIZE) for column in range(_SIZE)]
    alike = [(r, c) for r, c in places if one[r][c] == other[r][c] and c < _SIZE - 1]
    given = sorted(rng.sample(alike, min(4, len(alike))))
    pairs = [((r, c), (r, c + 1)) for r, c in places if c < _SIZE - 1]
    pairs += [((r, c), (r + 1, c)) for r, c in places if r < _SIZE - 1]
    signs = [
        [list(a), list(b), ">" if one[a[0]][a[1]] > one[b[0]][b[1]] else "<"]
        for a, b in rng.sample(pairs, len(pairs))
        if (one[a[0]][a[1]] > one[b[0]][b[1]]) == (other[a[0]][a[1]] > other[b[0]][b[1]])
    ]
    rows = "\n".join(" ".join(str(one[r][c]) if (r, c) in given else "X" for c in range(_SIZE)) for r in range(_SIZE))
    question = f"A {_SIZE}x{_SIZE} Futoshiki.\n\nCurrent puzzle:\n{rows}\n\nInequality constraints:\n..."
    metadata = {"grid_size": _SIZE, "prefilled_coords": [list(each) for each in given], "constraints": signs[:6]}
    return _data("", question, **metadata), [one, other]


def calcudoko(rng: random.Random) -> Game:
    """Regions of a cell, or of two side by side, whose targets hold in two squares."""
    one, other = _two_squares(rng)
    free = {(row, column) for row in range(_SIZE) for column in range(_SIZE)}
    regions: list[dict[str, Any]] = []
    while free:
        r, c = min(free)
        cells = [(r, c), *([(r, c + 1)] if (r, c + 1) in free and rng.random() < 0.7 else [])]
        a, b = ([square[row][column] for row, column in cells] for square in (one, other))
        if sum(a) != sum(b):
            cells = [(row, column) for row in range(r, _SIZE) for column in [c] if (row, column) in free]
            a, b = ([square[row][column] for row, column in cells] for square in (one, other))
        if sum(a) != sum(b):
            return calcudoko(rng)
        free -= set(cells)
        named = [f"({row + 1},{column + 1})" for row, column in cells]
        operator, target = "+", sum(a)
        if len(a) == 2 and abs(a[0] - a[1]) == abs(b[0] - b[1]) and rng.random() < 0.5:
            operator, target = "-", abs(a[0] - a[1])
        regions.append({"cells": named, "target": target, "operator": operator})
    return _data("", grid_size=_SIZE, regions=regions), [one, other]


def cipher(rng: random.Random) -> Game:
    """A text in capitals."""
    text = " ".join(rng.sample(_WORDS.upper().split(), 3))
    return _data(f"[[{text}]]"), [text]


def cryptarithm(rng: random.Random) -> Game:
    """A sum of two numbers."""
    a, b = rng.randrange(100, 999), rng.randrange(100, 999)
    return _data(f"{a} + {b} = {a + b}"), [f"{a} + {b} = {a + b}"]


def word_sorting(rng: random.Random) -> Game:
    """Words in order."""
    words = sorted(rng.sample(_WORDS.split(), 6))
    return _data(", ".join(words)), [words]


def word_sorting_mistake(rng: random.Random) -> Game:
    """The number of a thought, or that there is no mistake."""
    number = rng.randrange(1, 30)
    return (_data(None), ["No"]) if number > 24 else (_data(str(number)), [number])


def object_properties(rng: random.Random) -> Game:
    """A number of things."""
    number = rng.randrange(2, 60)
    return _data(str(number)), [number]


def buggy_tables(rng: random.Random) -> Game:
    """A difference of sums, to two decimals."""
    text = f"{rng.choice([1, 1, -1]) * rng.randrange(100, 999_999) / 100:.2f}"
    return _data(text), [text]


def wordscapes(rng: random.Random) -> Game:
    """A word across the top, and words down from two of its letters."""
    while True:
        words = [word for word in _WORDS.split() if len(word) <= 6]
        across = rng.choice(words)
        first, last = (
            [word for word in words if word[0] == sign and word != across] for sign in (across[0], across[-1])
        )
        if first and last:
            break
    down = [rng.choice(first), rng.choice(last)]
    grid = [["" for _ in across] for _ in range(max(map(len, down)))]
    grid[0] = list(across)
    for column, word in zip((0, len(across) - 1), down, strict=True):
        for row, sign in enumerate(word):
            grid[row][column] = sign
    layout = [["X" if cell else "0" for cell in row] for row in grid]
    solution = [[cell or " " for cell in row] for row in grid]
    return _data("", grid=layout, across_words=[across], down_words=down), [solution]


def norinori(rng: random.Random) -> Game:
    """Dominoes apart from each other, and regions that two of their cells are in."""
    size = 6
    cells = [(r, c) for r in range(1, size + 1) for c in range(1, size + 1)]
    dominoes: list[list[tuple[int, int]]] = []
    near: set[tuple[int, int]] = set()
    for r, c in rng.sample(cells, len(cells)):
        domino = [(r, c), rng.choice([(r, c + 1), (r + 1, c)])]
        if domino[1] in cells and not near & set(domino):
            dominoes.append(domino)
            near |= {(a + i, b + j) for a, b in domino for i, j in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))}
    owner = {cell: "ABCDEFGHIJKLMN"[at] for at, domino in enumerate(dominoes) for cell in domino}
    while len(owner) < len(cells):
        r, c = rng.choice([cell for cell in cells if cell not in owner])
        beside = [owner[each] for each in ((r, c + 1), (r + 1, c), (r, c - 1), (r - 1, c)) if each in owner]
        if beside:
            owner[r, c] = rng.choice(beside)
    grid = [[owner[r, c] for c in range(1, size + 1)] for r in range(1, size + 1)]
    return _data("", region_grid=grid), [sorted(dominoes)]


BUILDERS = {
    "arc_agi": arc_agi,
    "arc_agi_2": arc_agi,
    "buggy_tables": buggy_tables,
    "calcudoko": calcudoko,
    "cipher": cipher,
    "cryptarithm": cryptarithm,
    "futoshiki": futoshiki,
    "norinori": norinori,
    "object_properties": object_properties,
    "word_sorting": word_sorting,
    "word_sorting_mistake": word_sorting_mistake,
    "wordscapes": wordscapes,
    "zebra_puzzle": zebra_puzzle,
}
