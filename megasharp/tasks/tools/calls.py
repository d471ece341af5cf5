"""Calls of tools in what a policy has said, in the notations that models are taught.

`json` reads two notations, each known by how it begins:

- Hermes', which Qwen2.5 and Qwen3 have too: `<tool_call>{"name": "search", "arguments": {"query": "tin"}}</tool_call>`,
  once for each call, after any other text;
- Llama 3's, where the whole turn is the call: `{"name": "search", "parameters": {"query": "tin"}}`, several with `;`
  between them. `<|python_tag|>`, which may stand before, is a special token and no part of a turn's text.

SGLang's parsers of both (`--tool-call-parser hermes`, `qwen25`, `llama3`) find the same calls, which the long tests
compare. Where they take a malformed call for text, it is `Malformed` here: an environment tells the policy.

`short` is for models too small for JSON: a turn `?8*3` is a call of the only tool with `8*3` for its only argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Notation = Literal["json", "short"]
SHORT_CALL, SHORT_ANSWER, SHORT_END = "?", "=", ":"

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, which there need not be. Example: `Call("search", {"query": "tin"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that was meant as a call and is none; `why` is for who wrote it."""

    why: str


def json_calls(text: str) -> list[Call | Malformed]:
    """Return the calls of a turn in `json`, in order; none where it has none."""
    if _OPEN in text:
        return [*_tagged(text)]
    _, tag, after = text.partition(_PYTHON_TAG)
    return [*_llama(after.strip() if tag else text, bool(tag))]


def short_call(text: str, tool: str, argument: str) -> list[Call | Malformed]:
    """Return the call of a turn in `short`, of this tool with this one argument; none where it is no call."""
    return [Call(tool, {argument: text[len(SHORT_CALL) :]})] if text.startswith(SHORT_CALL) else []


def _tagged(text: str) -> Iterator[Call | Malformed]:
    place = 0
    while (begun := text.find(_OPEN, place)) >= 0:
        start = begun + len(_OPEN)
        start += len(text[start:]) - len(text[start:].lstrip())
        value, place = _decoded(text, start)
        rest = text[place:].lstrip()
        if not isinstance(value, Malformed) and rest and not rest.startswith(_CLOSE):
            value = Malformed(f"a call's JSON must be followed by {_CLOSE}")
        yield from _calls_in(value)


def _llama(text: str, tagged: bool) -> Iterator[Call | Malformed]:
    """Yield the call that a text begins with, and those that follow it; text between them is no call."""
    first, place = _decoded(text, 0) if text.startswith("{") else (None, 0)
    meant = tagged or (isinstance(first, dict) and "name" in first) or _LLAMA_CALL.match(text)
    if not meant:
        return
    yield from _calls_in(Malformed("a call must be a JSON object") if first is None else first)
    while following := _LLAMA_CALL.search(text, place):
        value, place = _decoded(text, following.start())
        yield from _calls_in(value)


def _decoded(text: str, start: int) -> tuple[object, int]:
    """Return the JSON value that begins at a place, and its end; Malformed where none does, and where to look on."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return Malformed(f"a call must be JSON ({str(error).partition(':')[0]})"), start + 1


def _calls_in(value: object) -> Iterator[Call | Malformed]:
    for each in value if isinstance(value, list) and value else [value]:
        if isinstance(each, Malformed):
            yield each
        elif not (isinstance(each, dict) and isinstance(each.get("name"), str)):
            yield Malformed("a call must be an object with a name and arguments")
        else:
            arguments = each.get("parameters") or each.get("arguments", {})
            is_object = isinstance(arguments, dict)
            yield Call(each["name"], arguments) if is_object else Malformed("a call's arguments must be an object")
