"""Programming problems: their data files, one JSON object a line.

Fields: `id`, `prompt`, and at least one kind of tests: `stdin`, a list of [input, expected output]; `calls`, a list of
[arguments, expected value] where each argument and the value are JSON texts, with the `function` that is called;
`check`, Python text that defines `check(candidate)`, with the `function` that is the candidate, and `setup`, text that
`check` may use. `rewards/code.py` has an example of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasharp.errors import UserError
from megasharp.rewards.code import CallTest, CodeAnswer, StdinTest

_TEXTS = ("function", "check", "setup")


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """One line of a data file.

    Example: `{"id": "sum", "prompt": "Print the sum of two numbers.", "stdin": [["2 3\\n", "5\\n"]]}`.
    """

    id: str
    prompt: str
    answer: CodeAnswer


def read_records(path: Path) -> list[CodeRecord]:
    """Read a JSONL file.

    Raises UserError, naming the file and the line, for a missing or empty file, a bad line, a repeated id.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read this data file ({error}); check data.path") from error
    records = [_record(line, f"{path}:{row}") for row, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise UserError(f"{path}: no problems in this data file; check data.path")
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise UserError(f"{path}: the id {record.id!r} appears twice; give each problem its own")
        seen.add(record.id)
    return records


def _record(line: str, where: str) -> CodeRecord:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: not a JSON object; write one object per line")
    for name in ("id", "prompt"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise UserError(f"{where}: '{name}' must be a non-empty string")
    return CodeRecord(fields["id"], fields["prompt"], _answer(fields, where))


def _answer(fields: Mapping[str, Any], where: str) -> CodeAnswer:
    texts = {name: fields.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: '{name}' must be a string, got {text!r}")
    stdin = _pairs(fields, "stdin", where, _text)
    calls = _pairs(fields, "calls", where, _json_texts)
    if not (stdin or calls or texts["check"]):
        raise UserError(f"{where}: no tests; give stdin, calls or check")
    if (calls or texts["check"]) and not texts["function"]:
        raise UserError(f"{where}: 'function' must name what calls and check are of")
    return CodeAnswer(
        stdin=tuple(StdinTest(given, expected) for given, expected in stdin),
        calls=tuple(CallTest(tuple(arguments), _checked_json(expected, where)) for arguments, expected in calls),
        **texts,
    )


def _pairs(fields: Mapping[str, Any], name: str, where: str, first: Callable[[Any], bool]) -> list[tuple[Any, str]]:
    pairs = fields.get(name, [])
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2 and first(pair[0]) and _text(pair[1])):
            raise UserError(f"{where}: '{name}' must be a list of [given, expected] texts, got {pair!r}")
    return [(given, expected) for given, expected in pairs]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _json_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_json, value))


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _checked_json(text: str, where: str) -> str:
    if not _is_json(text):
        raise UserError(f"{where}: an expected value of 'calls' is no JSON text: {text!r}")
    return text
