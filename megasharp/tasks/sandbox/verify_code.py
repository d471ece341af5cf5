"""The verifier of programs: each test runs in a sandbox of its own, and what came out is compared outside of it.

A program passes by exit code 0 and the right output or value; one that raises earns nothing whatever it has printed. No
expected output is ever where the program runs. Check functions, which hold them, run in a second sandbox, and the
function under test is asked from there for plain values: one that calls itself equal to everything does not travel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.code import PREAMBLE, CallTest, CodeAnswer, StdinTest, name_of, program_of, same_output, same_value
from megasharp.tasks.sandbox.inside import CHECK_BROKEN, FAILED, PASSED, PROGRAM_FAILED, decode
from megasharp.tasks.sandbox.programs import Clock, End, Ran, Sandbox, run, run_pair

# LiveCodeBench's limit on one test.
TEST_S = 6.0
_TRIES = 2
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
        """CORRECT where every test passes, and else what the first one says that does not.

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
            outcome, detail = _twice(test, deadline)
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
        given = test.given.encode("utf-8", "surrogatepass")
        return _printed(run(self.sandbox, job, given, clock), test.expected)

    def _call(self, job: _Job, test: CallTest, clock: Clock) -> _Found:
        return _returned(run(self.sandbox, job, b"", clock), test.expected)

    def _check(self, server: _Job, check: _Job, clock: Clock) -> _Found:
        return _checked(*run_pair(self.sandbox, server, check, clock))


def _twice(test: _Test, deadline: float) -> _Found:
    """What a test finds, tried once more where the sandbox did not start."""
    for _ in range(_TRIES):
        found = test(Clock(TEST_S, deadline))
        if found[0] is not Outcome.INFRA:
            break
    return found


def _ended_badly(ran: Ran) -> _Found | None:
    if ran.end is End.INFRA:
        return Outcome.INFRA, f"the sandbox did not start: {ran.complaint}"
    if ran.end is End.TIMEOUT:
        return Outcome.TIMEOUT, "a test took too long"
    if ran.end is End.MEMORY:
        return Outcome.ERROR, "out of memory"
    return (Outcome.ERROR, ran.complaint or f"exit code {ran.code}") if ran.code else None


def _printed(ran: Ran, expected: str) -> _Found:
    if bad := _ended_badly(ran):
        return bad
    right = same_output(expected, ran.printed.decode("utf-8", "replace"))
    return _RIGHT if right else (Outcome.WRONG, "prints something else")


def _returned(ran: Ran, expected: str) -> _Found:
    if bad := _ended_badly(ran):
        return bad
    if not ran.printed:
        return Outcome.WRONG, "ends without a value"
    try:
        right = same_value(expected, decode(json.loads(ran.printed)))
    except (ValueError, TypeError, RecursionError):
        return Outcome.ERROR, "its value cannot be read"
    return _RIGHT if right else (Outcome.WRONG, "returns something else")


def _checked(served: Ran, checked: Ran) -> _Found:
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
