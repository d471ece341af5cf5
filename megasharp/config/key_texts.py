"""Texts of `megasharp config`: all keys of a run file with their defaults, one key's meaning, a schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from inspect import isclass
from textwrap import fill
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import JsonSchema, alternatives, described_keys, in_words, tables_in
from megasharp.config.synonyms import other_name

HEAD = "# Every key of a run file with its default; `megasharp config KEY` says what one does."
WIDTH = 80


@dataclass(frozen=True)
class KeyFacts:
    """A key in words. A table whose keys stand below it has no default of its own: `default` is empty."""

    type: str
    default: str
    text: str


def config_text(key: str = "", *, json_schema: bool = False) -> str:
    """Return the answer to `megasharp config`, without a last line break. Raises UserError for an unknown key."""
    if json_schema:
        if key:
            raise UserError(f"config: --json-schema is of all keys; leave {key} out")
        return json.dumps(editor_schema(), indent=2)
    return describe_key(key) if key else "\n".join((HEAD, *_tree(RunConfig)))


def describe_key(key: str) -> str:
    """Return a key's type, default and description, and the keys below it.

    Raises UserError for an unknown key, naming a close one.
    """
    keys = dict(described_keys(RunConfig))
    if key not in keys:
        close = get_close_matches(key, keys, 1)
        nearest = f"; nearest is {close[0]}" if close and "." in key else other_name(key, None, keys)
        raise UserError(f"config: no key is called {key!r}{nearest or '; `megasharp config` prints all'}")
    table, name = keys[key]
    facts = key_facts(table, name)
    default = [f"  default  {facts.default}"] if facts.default else []
    below = [line for each in tables_in(table.model_fields[name].annotation) for line in ("", *_tree(each))]
    return "\n".join((key, f"  type     {facts.type}", *default, "", fill(facts.text, WIDTH), *below))


def key_facts(table: type[BaseModel], name: str) -> KeyFacts:
    """Return one key of a table in words."""
    field, schema = table.model_fields[name], _schema(table)
    default = "none, the key is required" if field.is_required() else "" if _is_table(field) else _value(field.default)
    return KeyFacts(in_words(alternatives(schema, [name]), schema), default, field.description or "")


@cache
def _schema(table: type[BaseModel]) -> JsonSchema:
    return table.model_json_schema()


def editor_schema() -> dict[str, Any]:
    """Return a JSON schema of run files, for editors that complete and check YAML.

    It requires no key: a file may get its required ones from what it includes, or from the command line.
    """
    schema = RunConfig.model_json_schema()
    for table in (schema, *schema["$defs"].values()):
        table.pop("required", None)
    include = {
        "description": "Files that this one is laid over, later ones first in priority.",
        "type": "array",
        "items": {"type": "string"},
    }
    schema["properties"] = {"include": include, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _tree(table: type[BaseModel], indent: str = "") -> Iterator[str]:
    """Yield the keys of `table` as lines of YAML."""
    for name, field in table.model_fields.items():
        inner = tables_in(field.annotation)
        if _is_table(field) and inner[0].model_fields:
            yield f"{indent}{name}:"
            yield from _tree(inner[0], f"{indent}  ")
        elif _is_table(field):
            yield f"{indent}{name}: {{}}"
        else:
            each = "each" if get_origin(field.annotation) in (list, dict) else "or"
            notes = ["required"] if field.is_required() else []
            notes += [f"{each} a table of {', '.join(one.model_fields)}" for one in inner]
            value = "" if field.is_required() else f" {_value(field.default)}"
            yield f"{indent}{name}:{value}{'  # ' + '; '.join(notes) if notes else ''}"


def _is_table(field: FieldInfo) -> bool:
    """Return whether the key is a table where a file does not say otherwise, so that its keys stand below it."""
    only = isclass(field.annotation) and issubclass(field.annotation, BaseModel)
    return only or isinstance(field.default, BaseModel)


def _value(default: object) -> str:
    """Return a default in YAML, on one line."""
    if isinstance(default, list):
        return f"[{', '.join(map(_value, default))}]"
    return default if isinstance(default, str) else json.dumps(default)
