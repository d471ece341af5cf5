"""Turns that call tools `f` and `g`, or mean to, with the calls that ours and SGLang's parsers find in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Found = list[tuple[str, Any]]

_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
_LLAMA = '{"name": "f", "parameters": {"a": 1}}'
_CALL: Found = [("f", {"a": 1})]


@dataclass(frozen=True)
class Turn:
    """A turn, the calls in it, and `malformed`, the number of others that were meant.

    `sglang` are the calls that a parser of SGLang's finds where those are others, by its name.
    """

    text: str
    calls: Found
    malformed: int = 0
    sglang: tuple[tuple[str, Found], ...] = ()


HERMES = [
    Turn("no call", []),
    Turn(_F, _CALL),
    Turn(f"I look.\n{_F}\n{_G}", [*_CALL, ("g", {})]),
    Turn(f"{_F}\nthen text", _CALL),
    Turn(f"{_F} {_F}", _CALL * 2),
    Turn('<tool_call>\n[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]\n</tool_call>', [*_CALL, ("g", {})]),
    Turn("<tool_call>\n</tool_call>", [], 1),
    Turn('<tool_call>\n{"name": "f", "arguments": {"a": 1}', [], 1),
    Turn('<tool_call>\n{"name": "f", "arguments": {"a": 1}} more\n</tool_call>', [], 1),
    # Its two parsers differ from each other.
    Turn(_F.replace("\n", ""), _CALL, sglang=(("qwen25", []),)),
    Turn(_F.removesuffix("</tool_call>"), _CALL, sglang=(("qwen25", []),)),
    Turn(f"<tool_call>\nf(a=1)\n</tool_call>\n{_F}", _CALL, 1, sglang=(("hermes", []),)),
    Turn(_F.replace("1", '"</tool_call>"'), [("f", {"a": "</tool_call>"})], sglang=(("hermes", []),)),
    # What no schema allows is told the policy.
    Turn(_F.replace('{"a": 1}', '"a"'), [], 1, sglang=(("hermes", [("f", "a")]), ("qwen25", [("f", "a")]))),
    Turn(_G.replace("g", "h"), [("h", {})], sglang=(("hermes", []), ("qwen25", []))),
]
LLAMA3 = [
    Turn("no call", []),
    Turn(_LLAMA, _CALL),
    Turn(f"<|python_tag|>{_LLAMA}", _CALL),
    Turn(f"text <|python_tag|>{_LLAMA}", _CALL),
    Turn(f"{_LLAMA};{_LLAMA}", _CALL * 2),
    Turn(f"{_LLAMA}; {_LLAMA.replace('f', 'g', 1)}", [*_CALL, ("g", {"a": 1})]),
    Turn(f"{_LLAMA} and so on", _CALL),
    Turn(f"so: {_LLAMA}", []),
    Turn('{"name": "f"}', [("f", {})]),
    Turn('{"parameters": {"a": 1}, "name": "f"}', _CALL),
    Turn('{"name": "f", "arguments": {"a": 1}}', _CALL),
    Turn('{"answer": 3}', []),
    Turn("{1, 2}", []),
    Turn(_LLAMA[:-1], [], 1),
    Turn("<|python_tag|>f.call(a=1)", [], 1),
    # Python's spelling of an object is no JSON.
    Turn("{'name': 'f', 'parameters': {'a': 1}}", [], sglang=(("llama3", _CALL),)),
]
