"""A mistake in a configuration file, in one line: the key, what is allowed there, and what was found.

pydantic finds the mistakes; its texts never reach a user. What is allowed comes from the schema, in the words of
`megasharp config KEY`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megasharp.common.errors import one_line
from megasharp.common.section import Section
from megasharp.config.schema_keys import JsonSchema, alternatives, described_keys, in_words, tables_in
from megasharp.config.synonyms import other_name

# The tree as YAML gives it.
Tree = dict[str, Any]
Path = tuple[int | str, ...]
# A value is shown up to this length.
_SHOWN = 60
# Mistakes whose text is our own: those of validators.
_OURS = ("value_error", "assertion_error")
# Keys to give where a whole table is missing.
_NEEDED: dict[Path, str] = {("data",): "data.path, data.set or data.mix"}
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Mistake:
    """The first mistake in a tree: its place, the reason in one line, and the number of other places with mistakes.

    Example: `Mistake(("policy", "tp"), "expected integer >= 1, found 0", 2)`.
    """

    place: Path
    reason: str
    others: int

    def told(self, where: str, written: str) -> str:
        """Return the line for a user: `my.yaml: policy.tp: expected integer >= 1, found 0 (line 4, and 2 more)`."""
        key = ".".join(map(str, self.place))
        notes = [*filter(None, [written]), *([f"and {self.others} more"] if self.others else [])]
        told = f" ({', '.join(notes)})" if notes else ""
        return f"{where}: {key + ': ' if key else ''}{self.reason}{told}"


def first_mistake(error: ValidationError, schema: type[Section], tree: Tree) -> Mistake:
    """Return the first mistake that pydantic found in `tree`."""
    mistakes = error.errors()
    paths = [path_of(tree, mistake) for mistake in mistakes]
    # The first mistake, or the one deepest inside the same value: that alternative of a union came closest. Of
    # several there an unknown key, because its message says which keys there are.
    below = [number for number, place in enumerate(paths) if place[: len(paths[0])] == paths[0]]
    first = mistakes[max(below, key=lambda n: (len(paths[n]), mistakes[n]["type"] == "extra_forbidden"))]
    # A place that leads to another mistake is the same mistake, seen from further up.
    ends = {path for path in paths if not any(len(p) > len(path) and p[: len(path)] == path for p in paths)}
    place = path_of(tree, first)
    place = place[:-1] if first["type"] == "invalid_key" else place
    # All missing keys are reported together, so that a new file is not fixed one key at a time.
    missing = [path for path, each in zip(paths, mistakes, strict=True) if each["type"] == first["type"] == "missing"]
    also = [".".join(map(str, path)) for path in dict.fromkeys(missing) if path in ends and path != place]
    told = f", and so {'are' if len(also) > 1 else 'is'} {', '.join(also)}" if also else ""
    reason = one_line(ValueError(_reason(first, place, schema) + told))
    return Mistake(place, reason, max(0, len(ends) - 1 - len(also)))


def path_of(tree: Tree, mistake: ErrorDetails) -> Path:
    """Return the place of a mistake in the user's tree, without the alternatives of unions that pydantic names too."""
    node: Any = tree
    path: list[int | str] = []
    for number, part in enumerate(mistake["loc"], start=1):
        inside = isinstance(node, dict) and part in node
        listed = isinstance(node, list) and isinstance(part, int)
        if inside or listed:
            node = node[part]
        elif not (mistake["type"] == "missing" and number == len(mistake["loc"])):
            continue
        path.append(part)
    return tuple(path)


def _reason(mistake: ErrorDetails, place: Path, schema: type[Section]) -> str:
    value, kind = mistake.get("input"), mistake["type"]
    if kind == "extra_forbidden":
        key = ".".join(map(str, place))
        keys = [known for known, _ in described_keys(schema)]
        # The tables of a recipe are those of its methods.
        method = ", and no method has this name" if place[:-1] == ("recipe",) else ""
        return f"unknown key{other_name(key, value, keys) or method + _nearest(schema, mistake['loc'])}"
    if kind == "missing":
        needed = _NEEDED.get(place)
        return "this key is required" + (f"; give {needed}" if needed else "")
    if kind in _OURS:
        said = mistake["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        # Of a whole table the message says what is wrong in it.
        return said if isinstance(value, dict) or not place else f"{said} (found {shown(value)})"
    if kind == "invalid_key":
        return f"expected names as keys, found {shown(value)}; write it in quotes"
    whole = _whole(schema)
    types = alternatives(whole, mistake["loc"])
    finite = "finite " if kind == "finite_number" else ""
    return f"expected {finite}{in_words(types, whole)}, found {shown(value)}{_advice(value, types)}"


@cache
def _whole(schema: type[Section]) -> JsonSchema:
    return schema.model_json_schema()


def shown(value: object) -> str:
    """Return a value as a configuration file writes it, on one line; a long one is cut short."""
    if isinstance(value, dict):
        return f"a table ({', '.join(map(str, value))})" if value else "an empty table"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _advice(value: object, types: Sequence[JsonSchema]) -> str:
    """Return what to do about a value of another type than `types`, after a semicolon; empty where nothing is known."""
    kinds = {each.get("type") for each in types}
    choices = [name for each in types for name in each.get("enum", [each.get("const")]) if isinstance(name, str)]
    if value is None:
        return "; give it a value, or leave the key out"
    if isinstance(value, str) and (close := get_close_matches(value, choices, 1)):
        return f"; nearest is {close[0]}"
    if isinstance(value, str) and kinds & {"integer", "number"} and _NUMBER.fullmatch(value):
        return "; write it without quotes"
    entries = {each["items"].get("type") for each in types if isinstance(each.get("items"), dict)}
    if entries & ({"string"} if isinstance(value, str) else {"integer", "number"}) and isinstance(
        value, str | int | float
    ):
        return f"; write [{value if isinstance(value, str) else shown(value)}]"
    if "string" in kinds and not choices and not isinstance(value, str | list | dict):
        return f'; write "{value}"' if not isinstance(value, bool) else "; write it in quotes"
    return ""


def _nearest(schema: type[BaseModel], location: Path) -> str:
    """Return a hint with the keys that exist at the place of an unknown key."""
    tables: list[type[BaseModel]] = [schema]
    named = False
    for part in location[:-1]:
        if named:
            # A table's name in a table of tables.
            named = False
            continue
        fields = [table.model_fields[part] for table in tables if part in table.model_fields]
        named = any(get_origin(field.annotation) is dict for field in fields)
        # Where the part is no key, it is a place in a list, or a table among alternatives, by its name.
        tables = (
            [table for field in fields for table in tables_in(field.annotation)]
            if fields
            else [table for table in tables if isinstance(part, int) or table.__name__ == part]
        )
    if len(tables) != 1:
        return ""
    known = list(tables[0].model_fields)
    if not known:
        return "; this table has no keys"
    close = get_close_matches(str(location[-1]), known, 1)
    return f"{f', nearest is {close[0]}' if close else ''}; known keys here: {', '.join(known)}"
