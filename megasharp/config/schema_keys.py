"""The keys of a schema: walked over by dotted path, and their types in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

# A type as JSON schema writes it.
JsonSchema = Mapping[str, Any]
_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
}
# Regular expressions of the schema, as a person would say them.
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._+-]*$": "of letters, digits and . _ + - that begins with a letter or digit",
    r"^[A-Za-z0-9_.-]+$": "of letters, digits and . _ -",
}
_NAMES = {"object": "table", "array": "list"}
_PLURAL = re.compile(r"^(string|integer|number|table|(?:non-empty )?list|any value)\b")
# A table with more keys is named by its first ones.
_MOST_KEYS = 6


def tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables among a field's alternatives, also those in a list or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for one in get_args(annotation) for table in tables_in(one)]


def described_keys(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[type[BaseModel], str]]]:
    """Yield every key of `table` and of the tables below it, by dotted path, with its table and its name there."""
    for name, field in table.model_fields.items():
        yield f"{prefix}{name}", (table, name)
        for inner in tables_in(field.annotation):
            yield from described_keys(inner, f"{prefix}{name}.")


def alternatives(whole: JsonSchema, location: Sequence[int | str]) -> list[JsonSchema]:
    """Return the types that `whole`, a table's JSON schema, allows at a place, references followed.

    Parts of `location` that lead nowhere are passed over: pydantic names the alternatives of a union there too.
    """
    here = _followed(whole, whole)
    for part in location:
        below = [inner for each in here if (inner := _below(each, part)) is not None]
        here = [one for inner in below for one in _followed(inner, whole)] or here
    return here


def _followed(schema: JsonSchema, whole: JsonSchema) -> list[JsonSchema]:
    """Return the alternatives of a type, each without a reference."""
    if "$ref" in schema:
        return _followed(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return [one for each in schema["anyOf"] for one in _followed(each, whole)]
    return [schema]


def _below(schema: JsonSchema, part: int | str) -> JsonSchema | None:
    """Return the type of an entry of a table or list; None where it has no such entry."""
    if isinstance(part, str) and part in schema.get("properties", {}):
        found: JsonSchema = schema["properties"][part]
        return found
    inner = schema.get("items") if isinstance(part, int) else schema.get("additionalProperties")
    return inner if isinstance(inner, dict) else None


def in_words(types: Sequence[JsonSchema], whole: JsonSchema) -> str:
    """Return alternatives in words. Example: "integer >= 1 or null"."""
    said = [word for each in types for word in _words(each, whole)]
    words = list(dict.fromkeys(said))
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _words(schema: JsonSchema, whole: JsonSchema) -> list[str]:
    if "enum" in schema or "const" in schema:
        return [str(value) for value in schema.get("enum", [schema.get("const")])]
    kind = str(schema.get("type", "any value"))
    if kind == "boolean":
        return ["true", "false"]
    if "properties" in schema:
        keys = list(schema["properties"])
        more = ", ..." if len(keys) > _MOST_KEYS else ""
        return [f"table ({', '.join(keys[:_MOST_KEYS])}{more})" if keys else "empty table"]
    words = _NAMES.get(kind, kind)
    if "minItems" in schema:
        exact = schema["minItems"] == schema.get("maxItems")
        words = f"list of {schema['minItems']}" if exact else "non-empty list"
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, dict):
        words += f"{'' if words[-1].isdigit() else ' of'} {_several(in_words(_followed(inner, whole), whole))}"
    bounds = [text.format(f"{schema[bound]:g}") for bound, text in _BOUNDS.items() if bound in schema]
    bounds += [PATTERNS[schema["pattern"]]] if "pattern" in schema else []
    return [" ".join((words, " and ".join(bounds))).rstrip()]


def _several(words: str) -> str:
    """Return the words for entries of a list or table. Example: "integers >= 1"."""
    return f"({words})" if " or " in words else _PLURAL.sub(r"\1s", words).removeprefix("any ")
