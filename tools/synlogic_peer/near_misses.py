"""Answers that are nearly right: one cell, two swapped, one more or less, off by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

_TRIES = 40
Rows = list[list[Any]]


def near_misses(value: Any, count: int, rng: random.Random) -> list[tuple[str, Any]]:
    """Up to `count` other values of the same type, each with the name of the change; changes come in turn."""
    changes = _changes(value)
    found: list[tuple[str, Any]] = []
    for attempt in range(_TRIES * count):
        if len(found) == count:
            break
        change = changes[attempt % len(changes)]
        other = change(value, rng)
        if other not in (None, value) and all(other != each for _, each in found):
            found.append((change.__name__.strip("_").replace("_", " "), other))
    return found


def _changes(value: Any) -> list[Callable[[Any, random.Random], Any]]:
    if isinstance(value, dict):
        return [_values_swapped, _key_dropped, _cell_of_a_table]
    if isinstance(value, int):
        return [_off_by_one, _another_digit, _sign_changed, _ten_times]
    if isinstance(value, str):
        return [_sign_replaced, _two_signs_swapped, _digit_changed, _one_dropped, _sign_doubled]
    if value and isinstance(value[0], list | tuple):
        return [_cell_changed, _cells_swapped, _rows_swapped, _cell_off_by_one, _one_dropped, _transposed]
    return [_one_dropped, _parts_swapped, _part_changed, _part_added]


def _listed(value: Any) -> Rows:
    return [list(row) for row in value]


def _like(rows: Rows, value: Any) -> Any:
    """Lists and tuples where `value` has them."""
    return type(value)(type(value[0])(row) for row in rows)


def _place(rows: Rows, rng: random.Random) -> tuple[int, int]:
    row = rng.randrange(len(rows))
    return row, rng.randrange(len(rows[row]))


def _cell_changed(value: Any, rng: random.Random) -> Any:
    rows = _listed(value)
    (a, b), (c, d) = _place(rows, rng), _place(rows, rng)
    rows[a][b] = rows[c][d]
    return _like(rows, value)


def _cells_swapped(value: Any, rng: random.Random) -> Any:
    rows = _listed(value)
    (a, b), (c, d) = _place(rows, rng), _place(rows, rng)
    rows[a][b], rows[c][d] = rows[c][d], rows[a][b]
    return _like(rows, value)


def _rows_swapped(value: Any, rng: random.Random) -> Any:
    rows = _listed(value)
    a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
    rows[a], rows[b] = rows[b], rows[a]
    return _like(rows, value)


def _cell_off_by_one(value: Any, rng: random.Random) -> Any:
    rows = _listed(value)
    a, b = _place(rows, rng)
    cell = rows[a][b]
    if isinstance(cell, tuple):
        rows[a][b] = (cell[0] + rng.choice([-1, 1]), cell[1])
    elif isinstance(cell, int):
        rows[a][b] = cell + rng.choice([-1, 1])
    return _like(rows, value)


def _one_dropped(value: Any, rng: random.Random) -> Any:
    """A row, part or sign less."""
    at = rng.randrange(len(value) or 1)
    return value[:at] + value[at + 1 :] if len(value) > 1 else None


def _transposed(value: Any, rng: random.Random) -> Any:
    rows = _listed(value)
    return _like([list(column) for column in zip(*rows, strict=False)], value) if rows else None


def _values_swapped(value: dict[str, Any], rng: random.Random) -> Any:
    one, other = rng.sample(sorted(value), 2)
    return {**value, one: value[other], other: value[one]}


def _key_dropped(value: dict[str, Any], rng: random.Random) -> Any:
    gone = rng.choice(sorted(value))
    return {key: each for key, each in value.items() if key != gone}


def _cell_of_a_table(value: dict[str, Any], rng: random.Random) -> Any:
    key = rng.choice(sorted(value))
    if isinstance(value[key], dict):
        return {**value, key: {**value[key], rng.choice(sorted(value[key])): "fox"}}
    return {**value, key: [(row, column + rng.choice([-1, 1])) for row, column in value[key]]}


def _off_by_one(value: int, rng: random.Random) -> int:
    return value + rng.choice([-1, 1])


def _another_digit(value: int, rng: random.Random) -> int:
    return int(str(abs(value))[:-1] + str(rng.randrange(10)))


def _sign_changed(value: int, rng: random.Random) -> int:
    return -value


def _ten_times(value: int, rng: random.Random) -> int:
    return 10 * value


def _kinds(text: str) -> Iterator[list[int]]:
    """The places of signs that can stand for each other: digits, letters, brackets, operators."""
    for kind in (str.isdigit, str.isalpha, "([{<>}])".__contains__, "+-*/%".__contains__):
        places = [at for at, sign in enumerate(text) if kind(sign)]
        if len(places) > 1:
            yield places


def _sign_replaced(value: str, rng: random.Random) -> Any:
    kinds = list(_kinds(value))
    if not kinds:
        return None
    places = rng.choice(kinds)
    at = rng.choice(places)
    return value[:at] + value[rng.choice(places)] + value[at + 1 :]


def _two_signs_swapped(value: str, rng: random.Random) -> Any:
    kinds = list(_kinds(value))
    if not kinds:
        return None
    one, other = sorted(rng.sample(rng.choice(kinds), 2))
    return value[:one] + value[other] + value[one + 1 : other] + value[one] + value[other + 1 :]


def _digit_changed(value: str, rng: random.Random) -> Any:
    places = [at for at, sign in enumerate(value) if sign.isdigit()]
    if not places:
        return None
    at = rng.choice(places)
    return value[:at] + str((int(value[at]) + rng.choice([1, 9])) % 10) + value[at + 1 :]


def _sign_doubled(value: str, rng: random.Random) -> str:
    at = rng.randrange(len(value))
    return value[:at] + value[at] + value[at:]


def _parts_swapped(value: list[Any], rng: random.Random) -> Any:
    other = list(value)
    rng.shuffle(other)
    return other


def _part_changed(value: list[Any], rng: random.Random) -> Any:
    if not value:
        return None
    at = rng.randrange(len(value))
    return [*value[:at], _other(value[at], rng), *value[at + 1 :]]


def _part_added(value: list[Any], rng: random.Random) -> Any:
    return [*value, _other(value[-1] if value else "3", rng)]


def _other(part: Any, rng: random.Random) -> Any:
    """Another value of a kind: a number near it, the other truth, another letter or word."""
    if isinstance(part, int):
        return part + rng.choice([-1, 1])
    pairs = {"yes": "no", "no": "yes", "\u662f": "\u5426", "\u5426": "\u662f"}
    if part in pairs:
        return pairs[part]
    if part.isdigit():
        return str(int(part) + rng.choice([1, 2]))
    return rng.choice("ABCDEF") if len(part) == 1 else part + "s"
