"""Programs in every shape, right and wrong ones, and all the ways to seem right without being it.

Each with and without bubblewrap: nothing here is dangerous.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from cases import each_case
from programs_to_judge import ADD, SMALLEST, SUM, response
from waiting import HANG_S, SOON_S

from megasharp.common.records import Outcome, Verdict
from megasharp.config.data import SandboxKind
from megasharp.tasks import code
from megasharp.tasks.code import CallTest, CodeAnswer, CodeVerifier, StdinTest
from megasharp.tasks.sandbox import programs
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.inside import decode, encode
from megasharp.tasks.sandbox.programs import Sandbox

CORRECT, WRONG, ERROR, TIMEOUT = Outcome.CORRECT, Outcome.WRONG, Outcome.ERROR, Outcome.TIMEOUT


# Of a module, so that each test is run in both, also those that loop over cases.
@pytest.fixture(
    scope="module", autouse=True, params=["none", pytest.param("bubblewrap", marks=pytest.mark.long("sandbox"))]
)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    kind: SandboxKind = request.param
    return open_sandbox(kind)


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test program enough time, but for the tests of that limit."""
    monkeypatch.setattr(code, "TEST_S", HANG_S)


def judge(sandbox: Sandbox, program: str, answer: CodeAnswer, seconds: float = HANG_S) -> Verdict:
    return CodeVerifier(sandbox, seconds)(response(program), answer)


# Both are functions of what stands before every program, `from operator import *` and `from statistics import *`.
SUM_OF_TWO = CodeAnswer(function="add", calls=(CallTest(("2", "3"), "5"),))
MEDIAN = CodeAnswer(function="median", check="def check(candidate):\n    assert candidate([3, 1, 2]) == 2\n")

RIGHT = [
    (SUM, "print(sum(map(int, input().split())))"),
    (SUM, "if __name__ == '__main__':\n    import sys\n    print(sum(map(int, sys.stdin.read().split())))"),
    (SUM, "from __future__ import annotations\nprint(sum(map(int, input().split())), flush=True)\nraise SystemExit"),
    (SMALLEST, "def smallest(values: List[int], count):\n    print('noise')\n    return sorted(values)[:count]"),
    (SMALLEST, "class Solution:\n    def smallest(self, values, count):\n        return tuple(sorted(values)[:count])"),
    (ADD, "def add(x, y):\n    print('noise')\n    return x + y"),
    # It names the library's function itself, which is an honest answer.
    (SUM_OF_TWO, "from operator import add"),
    (SUM_OF_TWO, "from operator import *"),
    (SUM_OF_TWO, "add = lambda x, y: x + y"),
    (SUM_OF_TWO, "def set_up():\n    global add\n    add = operator.add\nset_up()"),
]


@each_case(("answer", "program"), RIGHT)
def test_right_programs(sandbox: Sandbox, answer: CodeAnswer, program: str) -> None:
    verdict = judge(sandbox, program, answer)
    assert (verdict.outcome, verdict.reward, verdict.detail) == (CORRECT, 1.0, "")
    assert verdict.canonical_answer


EQUAL_TO_ALL = "class Yes(%s):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
GARBAGE = """
import os
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b"[")
    except OSError:
        pass
os._exit(0)
"""
WRONG_ONES = [
    (SUM, "print(5)", WRONG, "prints something else"),
    (SUM, "import os\nos._exit(0)", WRONG, "prints something else"),
    (SUM, "exit(0)", WRONG, "prints something else"),
    (SUM, "print(sum(map(int, input().split())))\n1 / 0", ERROR, "ZeroDivisionError: division by zero"),
    (SUM, "print(sum(map(int, input().split())))\nraise SystemExit(3)", ERROR, "exit code 3"),
    (SUM, "print(", ERROR, "SyntaxError: '(' was never closed"),
    (SUM, "print(sum(map(int, input().split())), flush=True)\nimport os\nos.kill(os.getpid(), 9)", ERROR, "exit code"),
    (SUM, "import os\nwhile True:\n    os.write(1, b'5\\n' * 100000)", ERROR, "File too large"),
    (SUM, "bytearray(100 * 2**30)", ERROR, "MemoryError"),
    (SMALLEST, "import os\nos._exit(0)", WRONG, "ends without a value"),
    (SMALLEST, "def smallest(values, count):\n    raise ValueError('no')", ERROR, "ValueError: no"),
    (SMALLEST, "def another(values, count):\n    return []", ERROR, "KeyError: 'smallest'"),
    (SUM_OF_TWO, "def another(x, y):\n    return 0", ERROR, "KeyError: 'add'"),
    (MEDIAN, "pass", ERROR, "KeyError: 'median'"),
    (SMALLEST, "def smallest(values, count):\n    return object()", ERROR, "a object is no plain value"),
    (SMALLEST, EQUAL_TO_ALL % "list" + "def smallest(values, count):\n    return Yes()", WRONG, "something else"),
    (SMALLEST, "def smallest(values, count):\n    x = []\n    x.append(x)\n    return x", ERROR, "RecursionError"),
    (SMALLEST, GARBAGE, ERROR, "cannot be read"),
    (ADD, "def add(x, y):\n    return x - y", WRONG, "the check fails"),
    (ADD, EQUAL_TO_ALL % "int" + "def add(x, y):\n    return Yes()", WRONG, "the check fails"),
    (ADD, EQUAL_TO_ALL % "object" + "def add(x, y):\n    return Yes()", ERROR, "a Yes is no plain value"),
    (ADD, "import os\nos._exit(0)", ERROR, "ends without a value"),
    (ADD, "def add(x, y):\n    os = __import__('os')\n    os._exit(0)", ERROR, "ends without a value"),
    (ADD, "def add(x, y):\n    raise AssertionError('mine')", ERROR, "AssertionError: mine"),
    (ADD, "import builtins, json\njson.dumps = lambda *_: '5'\nbuiltins.AssertionError = KeyError\n"
     "def add(x, y):\n    return None", WRONG, "the check fails"),
]  # fmt: skip


@each_case(("answer", "program", "outcome", "detail"), WRONG_ONES)
def test_what_earns_nothing(sandbox: Sandbox, answer: CodeAnswer, program: str, outcome: Outcome, detail: str) -> None:
    verdict = judge(sandbox, program, answer)
    assert (verdict.outcome, verdict.reward) == (outcome, 0.0), verdict
    assert detail in verdict.detail


@each_case(
    ("check", "detail"),
    [
        ("def check(candidate):\n    assert absent == candidate(1, 2)\n", "NameError: name 'absent' is not defined"),
        ("def check(candidate)\n", "SyntaxError"),
        ("def examine(candidate):\n    assert candidate(1, 2) == 3\n", "KeyError: 'check'"),
    ],
)
def test_a_check_that_does_not_run_is_no_fault_of_the_program(sandbox: Sandbox, check: str, detail: str) -> None:
    verdict = judge(sandbox, "def add(x, y):\n    return x + y", CodeAnswer(function="add", check=check))
    assert verdict.outcome is Outcome.INFRA
    assert "the data set's check does not run" in verdict.detail and detail in verdict.detail


def test_what_a_check_raises_over_a_value_is_the_programs_error(sandbox: Sandbox) -> None:
    answer = CodeAnswer(function="add", check="def check(candidate):\n    assert candidate(1, 2) + 1 == 4\n")
    verdict = judge(sandbox, "def add(x, y):\n    return None", answer)
    assert verdict.outcome is ERROR and "TypeError" in verdict.detail


LAST_WORDS = """
import sys, time
def tell(*error):
    time.sleep(%s)
    sys.__excepthook__(*error)
sys.excepthook = tell
def add(x, y):
    raise AssertionError("late")
"""


def test_what_a_served_program_says_at_its_end_is_waited_for(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is closed by then, if not bubblewrap's copy of it; nobody waits for long."""
    monkeypatch.setattr(programs, "_LAST_WORDS_S", HANG_S)
    verdict = judge(sandbox, LAST_WORDS % 0.5, ADD)
    assert (verdict.outcome, verdict.detail) == (ERROR, "AssertionError: late")
    monkeypatch.setattr(code, "TEST_S", 1.0)
    monkeypatch.setattr(programs, "_LAST_WORDS_S", 1.0)
    began = time.monotonic()
    verdict = judge(sandbox, LAST_WORDS % 3600, ADD)
    assert verdict.detail in ("ends without a value", "the check took too long"), verdict
    assert verdict.reward == 0.0
    assert time.monotonic() - began < SOON_S


@each_case(
    ("answer", "program"),
    [(SUM, "while True:\n    pass"), (SMALLEST, "import time\ntime.sleep(3600)"), (ADD, "while True:\n    pass")],
)
def test_what_takes_too_long(
    sandbox: Sandbox, answer: CodeAnswer, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "TEST_S", 1.0)
    began = time.monotonic()
    verdict = judge(sandbox, program, answer)
    assert verdict.outcome is TIMEOUT, verdict
    assert time.monotonic() - began < SOON_S


def test_all_tests_together_have_their_time(sandbox: Sandbox) -> None:
    """Each of them alone would have enough."""
    nap, program = StdinTest("", ""), "import time\ntime.sleep(0.5)"
    began = time.monotonic()
    assert judge(sandbox, program, CodeAnswer(stdin=(nap,))).outcome is CORRECT
    one = time.monotonic() - began
    began = time.monotonic()
    verdict = judge(sandbox, program, CodeAnswer(stdin=(nap,) * 100), seconds=4 * one)
    assert verdict.outcome is TIMEOUT and "too long" in verdict.detail, verdict
    assert time.monotonic() - began < 50 * one


def test_seconds_of_computing_are_limited_too(sandbox: Sandbox) -> None:
    brief = replace(sandbox, limits=replace(sandbox.limits, cpu_s=2))
    assert judge(brief, "while True:\n    pass", SUM).outcome is TIMEOUT


def test_no_program(sandbox: Sandbox) -> None:
    verdict = CodeVerifier(sandbox, 9.0)("print(5)", SUM)
    assert (verdict.outcome, verdict.reward) == (Outcome.FORMAT, 0.0)


@each_case("answer", [SUM, SMALLEST, ADD])
def test_a_sandbox_that_does_not_start_is_infra(answer: CodeAnswer) -> None:
    for broken in (("/bin/false",), ("/no/such/program",)):
        verdict = judge(Sandbox(broken, "python3", ()), "print(5)", answer)
        assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, 0.0), verdict
        assert verdict.detail.startswith("the sandbox did not start: ")


def test_values_travel_whole() -> None:
    value = {1: [(2, 3.5), {"a"}, frozenset({None}), True], (1, "x"): {"y": 1j}, "inf": float("inf")}
    assert decode(encode(value)) == value
    assert type(decode(encode(True))) is bool
    for nothing in (object(), len, b"x"):
        with pytest.raises(TypeError, match="is no plain value"):
            encode([nothing])
    for made_up in (["exec", []], ["list"], []):
        with pytest.raises(ValueError):
            decode(made_up)
