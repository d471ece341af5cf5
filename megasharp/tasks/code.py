"""Programming problems: their data files, one JSON object a line, and the programs that answer them.

Fields: `id`, `prompt`, and at least one kind of tests: `stdin`, a list of [input, expected output]; `calls`, a list of
[arguments, expected value] where each argument and the value are JSON texts, with the `function` that is called;
`check`, Python text that defines `check(candidate)`, with the `function` that is the candidate, and `setup`, text that
`check` may use. `CodeAnswer` has an example of each.

For the verifier, this file finds the program of a response and compares its output and values with those expected. It
is pure: nothing here runs a program, which is `megasharp/tasks/sandbox/verify_code.py`'s matter. A program never sees
what it ought to print or return; that is compared here, outside of where it runs. Extraction and comparison are
LiveCodeBench's (`lcb_runner/utils/extraction_utils.py`, `lcb_runner/evaluation/testing_util.py`), whose form
DeepCoder's tests have too; check functions are HumanEval's and HumanEval+'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.records import TaskAnswer
from megasharp.tasks.judge import TaskItem

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


_FENCE = "```"
_SHARED = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
# What LiveCodeBench puts before every program: starter code names List and the like.
PREAMBLE = "".join(
    [
        *(f"from {name} import *\n" for name in [*_SHARED, "builtins", "typing"]),
        *(f"import {name}\n" for name in _SHARED),
        "sys.setrecursionlimit(50000)\n",
    ]
)


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program reads `given` on its standard input and must print `expected`.

    Example: `StdinTest("2 3\\n", "5\\n")`.
    """

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function is called with arguments, each one JSON text, and must return a value, JSON text too.

    Example: `CallTest(("[3, 1, 2]", "2"), "[1, 2]")`.
    """

    arguments: tuple[str, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class CodeAnswer(TaskAnswer):
    """What a program is tested with; it must pass everything that is given.

    `function` is what calls and `check` are of: a function's name, or a method's of a class `Solution` where the
    program has one. `check` is Python text that defines `check(candidate)`, which raises AssertionError where the
    candidate is wrong; `setup` is text of the data set's (a prompt with helpers, say) that `check` may use.

    Examples, in the shapes of LiveCodeBench and DeepCoder (standard input), LiveCodeBench (a function) and HumanEval+:
    `CodeAnswer(stdin=(StdinTest("2 3\\n", "5\\n"),))`,
    `CodeAnswer(function="smallest", calls=(CallTest(("[3, 1, 2]", "2"), "[1, 2]"),))`,
    `CodeAnswer(function="add", check="def check(candidate):\\n    assert candidate(2, 3) == 5\\n")`.
    """

    stdin: tuple[StdinTest, ...] = ()
    function: str = ""
    calls: tuple[CallTest, ...] = ()
    check: str = ""
    setup: str = ""


def program_of(text: str) -> str | None:
    """What stands between the response's last two fences, as LiveCodeBench takes it; None where that is nothing."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE in line]
    if len(fences) < 2:
        return None
    program = "\n".join(lines[fences[-2] + 1 : fences[-1]])
    return program if program.strip() else None


def name_of(program: str) -> str:
    """A short name that programs share which differ in blank lines, comment lines and spaces at lines' ends only."""
    lines = [line.rstrip() for line in program.split("\n")]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    text = "\n".join(kept).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def same_output(expected: str, printed: str) -> bool:
    """Whether what a program printed is what it ought to, line by line.

    Spaces around the whole and around lines do not count. A line that differs may still be the same numbers (`1.0` and
    `1`), each exactly: as LiveCodeBench has it, there is no tolerance.
    """
    wanted, got = _lines(expected), _lines(printed)
    return len(wanted) == len(got) and all(map(_same_line, wanted, got))


def same_value(expected: str, value: object) -> bool:
    """Whether a function's value is that of a JSON text; a tuple counts as a list, as LiveCodeBench has it."""
    wanted: object = json.loads(expected)
    return bool(wanted == _lists(value))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(wanted: str, got: str) -> bool:
    if wanted == got:
        return True
    try:
        return _numbers(wanted) == _numbers(got)
    except InvalidOperation:
        return False


def _numbers(line: str) -> list[Decimal]:
    return [Decimal(word) for word in line.split()]


def _lists(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_lists(each) for each in value]
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return value


def load_items(path: Path) -> list[TaskItem]:
    """Programming problems from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, task="code", text=record.prompt, answer=record.answer, source=path.name)
        for record in read_records(path)
    ]
