"""Programming problems: their data files, one JSON object a line, and the verifier of the programs that answer them.

Fields: `id`, `prompt`, and at least one kind of tests: `stdin`, a list of [input, expected output]; `calls`, a list of
[arguments, expected value] where each argument and the value are JSON texts, with the `function` that is called;
`check`, Python text that defines `check(candidate)`, with the `function` that is the candidate, and `setup`, text that
`check` may use. `CodeAnswer` has an example of each.

Each test runs in a sandbox of its own, and its output or value is compared outside of it. A program passes by exit code
0 and the right output or value; one that raises earns nothing, whatever it has printed. No expected output is ever
where the program runs. Check functions, which hold them, run in a second sandbox and ask the function under test for
plain values from there: a value that calls itself equal to everything does not travel.

Extraction and comparison are LiveCodeBench's (`lcb_runner/utils/extraction_utils.py`,
`lcb_runner/evaluation/testing_util.py`), whose form DeepCoder's tests have too; check functions are HumanEval's and
HumanEval+'s.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.data_fields import Fields, check_names, read_objects
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.sandbox.inside import CHECK_BROKEN, FAILED, PASSED, PROGRAM_FAILED, decode
from megasharp.tasks.sandbox.programs import Clock, End, Ran, Sandbox, run, run_pair


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
    records = [_record(fields, where) for where, fields in read_objects(path, "check data.path")]
    check_names([record.id for record in records], path)
    return records


def _record(fields: Fields, where: str) -> CodeRecord:
    """Check a line's fields. Raises UserError, naming the line, also where it has no test."""
    name, prompt = fields.get("id"), fields.get("prompt")
    for key, value in (("id", name), ("prompt", prompt)):
        if not isinstance(value, str) or not value:
            raise UserError(f"{where}: '{key}' must be a non-empty string")
    texts: dict[str, Any] = {key: fields.get(key, "") for key in ("function", "check", "setup")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: '{key}' must be a string, got {text!r}")
    stdin = _pairs(fields, "stdin", where, _is_text)
    calls = _pairs(fields, "calls", where, lambda given: isinstance(given, list) and all(map(_is_json, given)))
    if not (stdin or calls or texts["check"]):
        raise UserError(f"{where}: no tests; give stdin, calls or check")
    if (calls or texts["check"]) and not texts["function"]:
        raise UserError(f"{where}: 'function' must name what calls and check are of")
    for _, expected in calls:
        if not _is_json(expected):
            raise UserError(f"{where}: an expected value of 'calls' is no JSON text: {expected!r}")
    answer = CodeAnswer(
        stdin=tuple(StdinTest(given, expected) for given, expected in stdin),
        calls=tuple(CallTest(tuple(arguments), expected) for arguments, expected in calls),
        **texts,
    )
    return CodeRecord(str(name), str(prompt), answer)


def _pairs(fields: Fields, name: str, where: str, accepts: Callable[[Any], bool]) -> list[tuple[Any, str]]:
    """The [given, expected] pairs of a field, of which `accepts` judges the first; none where there is no field."""
    pairs: Any = fields.get(name, [])
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2 and accepts(pair[0]) and _is_text(pair[1])):
            raise UserError(f"{where}: '{name}' must be a list of [given, expected] texts, got {pair!r}")
    return [(given, expected) for given, expected in pairs]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


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
# LiveCodeBench puts this before every program: starter code names List and the like.
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
    """The tests of a program; it must pass all of them.

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
    """The text between the response's last two fences, as LiveCodeBench takes it; None where that is nothing."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE in line]
    if len(fences) < 2:
        return None
    program = "\n".join(lines[fences[-2] + 1 : fences[-1]])
    return program if program.strip() else None


def name_of(program: str) -> str:
    """A short name, shared by programs that differ in blank lines, comment lines and spaces at lines' ends only."""
    lines = [line.rstrip() for line in program.split("\n")]
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    text = "\n".join(kept).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def same_output(expected: str, printed: str) -> bool:
    """Compare what a program printed with what it ought to print, line by line.

    Spaces around the whole and around lines do not count. A line that differs may still be the same numbers (`1.0` and
    `1`), each exactly: as LiveCodeBench has it, there is no tolerance.
    """
    wanted, got = _lines(expected), _lines(printed)
    return len(wanted) == len(got) and all(map(_same_line, wanted, got))


def same_value(expected: str, value: object) -> bool:
    """Compare a function's value with that of a JSON text; a tuple counts as a list, as LiveCodeBench has it."""
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


# LiveCodeBench's limit on one test.
TEST_S = 6.0
_Found = tuple[Outcome, str]
_Test = Callable[[Clock], _Found]
_Job = Mapping[str, object]
_RIGHT: _Found = (Outcome.CORRECT, "")


@dataclass(frozen=True, slots=True)
class CodeVerifier:
    """Judges a response by its program; `seconds` is for all of its tests together."""

    sandbox: Sandbox
    seconds: float

    def __call__(self, text: str, answer: TaskAnswer) -> Verdict:
        """CORRECT where every test passes, and otherwise the verdict of the first one that does not.

        The function under test is one that the program defines, imports or assigns itself. FORMAT: no program. WRONG:
        another output or value, or no value. ERROR: an exception, another exit code than 0, or too much memory.
        TIMEOUT: a test beyond its seconds, or all beyond theirs. INFRA: the sandbox did not start, twice, or the data
        set's check raises before it asks anything. The canonical answer is a name of the program.
        """
        assert isinstance(answer, CodeAnswer)
        program = program_of(text)
        if program is None:
            return Verdict(Outcome.FORMAT, 0.0, None, "no fenced block with a program in it")
        deadline = time.monotonic() + self.seconds
        for number, test in enumerate(self._tests(program, answer)):
            outcome, detail = test(Clock(TEST_S, deadline))
            if outcome is Outcome.INFRA:
                # A sandbox that did not start says nothing about the program: it is tried once more.
                outcome, detail = test(Clock(TEST_S, deadline))
            if outcome is Outcome.INFRA and number > 0 and time.monotonic() >= deadline:
                # Nothing was wrong with the sandbox: the tests before have left no time for it.
                outcome, detail = Outcome.TIMEOUT, "the tests took too long together"
            if outcome is not Outcome.CORRECT:
                return Verdict(outcome, 0.0, name_of(program), detail)
        return Verdict(Outcome.CORRECT, 1.0, name_of(program))

    def _tests(self, program: str, answer: CodeAnswer) -> Iterator[_Test]:
        job = {"preamble": PREAMBLE, "source": program, "function": answer.function}
        for stdin in answer.stdin:
            yield partial(self._stdin, {**job, "kind": "script"}, stdin)
        for call in answer.calls:
            yield partial(self._call, {**job, "kind": "call", "arguments": call.arguments}, call)
        if answer.check:
            check = {"kind": "check", "preamble": PREAMBLE + answer.setup, "source": answer.check}
            yield partial(self._check, {**job, "kind": "serve"}, check)

    def _stdin(self, job: _Job, test: StdinTest, clock: Clock) -> _Found:
        ran = run(self.sandbox, job, test.given.encode("utf-8", "surrogatepass"), clock)
        if bad := _ended_badly(ran):
            return bad
        right = same_output(test.expected, ran.printed.decode("utf-8", "replace"))
        return _RIGHT if right else (Outcome.WRONG, "prints something else")

    def _call(self, job: _Job, test: CallTest, clock: Clock) -> _Found:
        ran = run(self.sandbox, job, b"", clock)
        if bad := _ended_badly(ran):
            return bad
        if not ran.printed:
            return Outcome.WRONG, "ends without a value"
        try:
            right = same_value(test.expected, decode(json.loads(ran.printed)))
        except (ValueError, TypeError, RecursionError):
            return Outcome.ERROR, "its value cannot be read"
        return _RIGHT if right else (Outcome.WRONG, "returns something else")

    def _check(self, server: _Job, check: _Job, clock: Clock) -> _Found:
        served, checked = run_pair(self.sandbox, server, check, clock)
        for ran in (served, checked):
            if ran.end in (End.INFRA, End.MEMORY):
                return _ended_badly(ran) or _RIGHT
        if checked.end is End.TIMEOUT:
            return Outcome.TIMEOUT, "the check took too long"
        details = {PASSED: _RIGHT, FAILED: (Outcome.WRONG, "the check fails")}
        if checked.code in details:
            return details[checked.code]
        if checked.code == CHECK_BROKEN:
            return Outcome.INFRA, f"the data set's check does not run: {checked.complaint}"
        who = served if checked.code == PROGRAM_FAILED else checked
        return Outcome.ERROR, who.complaint or "ends without a value"


def _ended_badly(ran: Ran) -> _Found | None:
    if ran.end is End.INFRA:
        return Outcome.INFRA, f"the sandbox did not start: {ran.complaint}"
    if ran.end is End.TIMEOUT:
        return Outcome.TIMEOUT, "a test took too long"
    if ran.end is End.MEMORY:
        return Outcome.ERROR, "out of memory"
    return (Outcome.ERROR, ran.complaint or f"exit code {ran.code}") if ran.code else None


def load_items(path: Path) -> list[TaskItem]:
    """Programming problems from a JSONL file. Raises UserError as `read_records` does."""
    return [
        TaskItem(record.id, "code", record.prompt, record.answer, path.name, question=record.prompt)
        for record in read_records(path)
    ]
