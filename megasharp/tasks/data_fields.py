"""Reading the fields of a data file, which holds one JSON object a line.

Each object comes with its place (`file:line`), and the functions that check a field name that place in their UserError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date, time
from decimal import Decimal
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any

from megasharp.common.errors import UserError, reason_at

Fields = Mapping[str, object]


def read_objects(path: Path, remedy: str) -> list[tuple[str, Fields]]:
    """Read the objects of a JSONL file, each with its place, `file:line`; empty lines are skipped.

    Raises UserError, naming the file and the line, for a missing or empty file (`remedy` says what to do then) and for
    a line that is no JSON object.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot read this data file ({reason_at(error, path)}); check data.path") from error
    objects = [parse_object(line, f"{path}:{row}") for row, line in enumerate(lines, start=1) if line.strip()]
    if not objects:
        raise UserError(f"{path}: no problems in this data file; {remedy}")
    return objects


def parse_object(line: bytes, where: str) -> tuple[str, Fields]:
    """Parse one line's object and return it after its place. Raises UserError, naming that place, where it is none."""
    try:
        # Some programs put a byte order mark before the first line.
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason} at its byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        # The library's own text counts lines, of which there is one.
        reason = f"{error.msg} at character {error.pos + 1}"
        raise UserError(f"{where}: not a JSON object ({reason}); write one object per line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: not a JSON object; write one object per line")
    return where, fields


def text_field(fields: Fields, key: str, where: str) -> str:
    """Return a field that must be a non-empty string of Unicode text. Raises UserError otherwise."""
    value = fields.get(key)
    # JSON can hold halves of surrogate pairs, which no table or file name can.
    if not isinstance(value, str) or not value or not (value.isascii() or is_unicode(value)):
        found = absent(fields, key) or f", got {short(value)}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            found += f'; write it as text, "{value}"'
        raise UserError(f"{where}: '{key}' must be a non-empty string of Unicode text{found}")
    return value


def is_unicode(text: str) -> bool:
    """Return True for a text without halves of surrogate pairs."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def absent(fields: Fields, key: str) -> str:
    """Return the end of a message about a missing field: the fields that the row has. Empty where it has the field."""
    return "" if key in fields else f"; there is no field '{key}' here, only: {', '.join(map(str, fields)) or 'none'}"


def texts_field(fields: Fields, key: str, where: str) -> tuple[str, ...]:
    """Return a field that must be a non-empty list of non-empty strings. Raises UserError otherwise."""
    value = fields.get(key)
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: '{key}' must be a non-empty list of strings{absent(fields, key)}")
    return tuple(text_field({key: each}, key, where) for each in value)


def object_field(fields: Fields, key: str, where: str) -> Fields:
    """Return a field that must be an object. Raises UserError otherwise."""
    value = fields.get(key)
    if not isinstance(value, dict):
        raise UserError(f"{where}: '{key}' must be an object, got {short(value)}{absent(fields, key)}")
    return value


def optional_text(fields: Fields, key: str, where: str) -> str:
    """Return a field that must be a string or null where there is one; empty where there is none. Raises UserError."""
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: '{key}' must be a string, got {short(value)}")
    return value or ""


def number_field(fields: Fields, key: str, where: str) -> str:
    """Return a field that must be a number or text, as text; a whole number has no decimals: 27.0 is `27`.

    Raises UserError otherwise.
    """
    value = fields.get(key)
    if isinstance(value, float) and isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if whole else text_field(fields, key, where)


def positive_field(fields: Fields, key: str, where: str) -> int:
    """Return a field that must be a positive integer. Raises UserError otherwise."""
    value = fields.get(key)
    if not isinstance(value, int) or not is_positive(value):
        raise UserError(f"{where}: '{key}' must be a positive integer, got {value!r}{absent(fields, key)}")
    return value


def positives_field(fields: Fields, key: str, where: str) -> tuple[int, ...]:
    """Return a field that must be a list of two or more positive integers. Raises UserError otherwise."""
    value = fields.get(key)
    if not isinstance(value, list) or len(value) < 2 or not all(is_positive(each) for each in value):
        raise UserError(f"{where}: '{key}' must be two or more positive integers, got {value!r}{absent(fields, key)}")
    return tuple(value)


def is_positive(value: object) -> bool:
    """Return True for a positive integer; a JSON true or false is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def name_of(fields: Fields, keys: Iterable[str], path: Path, where: str) -> str:
    """Return the problem's id: the first of `keys` that it has, or else the file's name and the line's number."""
    for key in keys:
        if key in fields:
            value = fields[key]
            return str(value) if is_positive(value) or value == 0 else text_field(fields, key, where)
    return f"{path.stem}-{where.rpartition(':')[2]}"


def check_names(names: Iterable[str], path: Path) -> None:
    """Raise UserError where an id appears twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UserError(f"{path}: the id {name!r} appears twice; give each problem its own")
        seen.add(name)


def short(value: object) -> str:
    """Return a value as a message shows it: rows may hold megabytes."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain_columns(fields: Fields) -> dict[str, Any]:
    """Return a row as it travels to a user's reward: values of JSON's types, times and decimals as text.

    Pictures, sounds and bytes stay behind.
    """
    return {str(key): _plain(value) for key, value in fields.items() if _travels(value)}


# Nearly all values of a row, told by one look: a data file has millions.
_SCALARS = frozenset({str, int, float, bool, NoneType})


def _travels(value: object) -> bool:
    if type(value) in _SCALARS:
        return True
    return isinstance(value, str | int | float | Mapping | list | tuple | date | time | Decimal | None)


def _plain(value: object) -> object:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return plain_columns(value)
    if isinstance(value, list | tuple):
        return [*value] if _SCALARS.issuperset(map(type, value)) else [_plain(each) for each in value if _travels(each)]
    return value if isinstance(value, str | int | float | None) else str(value)
