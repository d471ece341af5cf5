"""Bombs in responses: each ends in bounded time, leaves no process, and costs the responses beside it nothing.

`-s` prints what each took and how many responses a second there were meanwhile. Nothing here runs but in bubblewrap, in
a sandbox that was found to hold before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from verdict_limits import limit_only
from waiting import HANG_S

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks import code
from megasharp.tasks.code import CodeAnswer, CodeVerifier, StdinTest
from megasharp.tasks.judge import Item, Verifier
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.pool import VerifierPool
from megasharp.tasks.sandbox.programs import Limits, Sandbox

pytestmark = pytest.mark.long("sandbox")

WORKERS = 2
PROGRAM_S, ITEM_S, BOUND_S = 4.0, 8.0, 240.0
# In a program that is to be ended; any other has all the time that it needs.
ENDLESS = "# endless"
BESIDE = 12
ANSWER = CodeAnswer(stdin=(StdinTest("", "fine"),))
ERROR, TIMEOUT, WRONG, INFRA = Outcome.ERROR, Outcome.TIMEOUT, Outcome.WRONG, Outcome.INFRA

PROGRAMS = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        {TIMEOUT},
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(600,)).start()",
        {ERROR, TIMEOUT},
    ),
    "100 GB": ("bytearray(100 * 2**30)", {ERROR}),
    "100 GB bit by bit": ("kept = []\nwhile True:\n    kept.append(bytearray(2**20))", {ERROR}),
    "files without end": (
        "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'wb').write(bytes(2**20))",
        {ERROR},
    ),
    "stdout flood": ("while True:\n    print('x' * 10**6)", {ERROR}),
    "stderr flood": ("import sys\nwhile True:\n    sys.stderr.write('x' * 10**6)", {ERROR}),
    "endless loop": ("while True:\n    pass", {TIMEOUT}),
    "one call of C code": ("sum(range(10**13))", {TIMEOUT}),
    "sleep": ("import time\ntime.sleep(600)", {TIMEOUT}),
    "ignored signals": (
        "import signal, time\nfor n in set(range(1, 32)) - {9, 19}:\n    signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(600)",
        {TIMEOUT},
    ),
    "kill(-1)": ("import os\nos.kill(-1, 9)", {WRONG, ERROR}),
    "kill of parents": (
        "import os, signal\nfor n in range(1, 100):\n    try:\n        os.kill(n, signal.SIGSTOP)\n"
        "    except OSError:\n        pass",
        {WRONG, ERROR, TIMEOUT},
    ),
    "daemons": (
        "import os, time\nfor n in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(600)\n        os._exit(0)",
        {WRONG},
    ),
    "network": ("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=60)", {ERROR}),
    "symlink escape": ("import os\nos.symlink('/', '/tmp/root')\nopen('/tmp/root/etc/passwd')", {ERROR}),
    "way out by /proc": ("import os\nos.chdir('/proc/1/root/../..')\nopen('etc/passwd')", {ERROR}),
    "deep recursion": ("def f(n):\n    return f(n + 1)\nf(0)", {ERROR}),
    "crash": ("import ctypes\nctypes.string_at(0)", {ERROR}),
}


def hang(text: str, _: TaskAnswer) -> Verdict:
    """Judge by sympy what a model wrote, as a verifier of mathematics would."""
    import sympy

    return Verdict(Outcome.CORRECT, 1.0, str(sympy.sympify(text)))


def make(sandbox: Sandbox) -> Mapping[str, Verifier]:
    """In the process that workers come from."""
    code.TEST_S = HANG_S
    endless, patient = CodeVerifier(sandbox, PROGRAM_S), CodeVerifier(sandbox, HANG_S)
    return {"code": lambda text, answer: (endless if ENDLESS in text else patient)(text, answer), "sympy": hang}


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_only(monkeypatch, lambda item: item.task == "sympy" or ENDLESS in item.text)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    sandbox = replace(open_sandbox("bubblewrap"), limits=Limits(memory_mb=256, processes=12))
    with_bombs = VerifierPool(partial(make, sandbox), {"code", "sympy"}, WORKERS, ITEM_S, memory_mb=1024)
    yield with_bombs
    with_bombs.close()


def response(program: str) -> Item:
    return Item("code", f"```\n{program}\n```", ANSWER)


def below(process: int) -> set[int]:
    """All processes that come from one, this one left out."""
    found: set[int] = set()
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        for task in tasks:
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | below(child)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def check(pool: VerifierPool, bomb: Item, outcomes: set[Outcome], name: str) -> None:
    """Judge a bomb among responses that are fine."""
    zygote = pool.zygote
    began = time.monotonic()
    verdicts = pool.verdicts([bomb, *[response("print('fine')")] * BESIDE])
    took = time.monotonic() - began
    print(f"{name}: {verdicts[0].outcome} ({verdicts[0].detail}) in {took:.1f} s, {len(verdicts) / took:.1f} a second")
    assert verdicts[0].outcome in outcomes, verdicts[0]
    assert [verdict.outcome for verdict in verdicts[1:]] == [Outcome.CORRECT] * BESIDE
    assert took < BOUND_S
    deadline = time.monotonic() + HANG_S
    while len(left := below(zygote)) > WORKERS:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)
    again = pool.verdicts([response("print('fine')")] * WORKERS)
    assert [verdict.outcome for verdict in again] == [Outcome.CORRECT] * WORKERS
    assert pool.zygote == zygote


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(pool: VerifierPool, name: str) -> None:
    program, outcomes = PROGRAMS[name]
    killed = pool.counts.killed
    check(pool, response(f"{ENDLESS}\n{program}" if TIMEOUT in outcomes else program), outcomes, name)
    assert pool.counts.killed == killed, "programs are ended by their verifier"


@pytest.mark.parametrize("text", ["3**(10**9)", "factorial(10**8)", "10**10**10"])
def test_sympy_bombs(pool: VerifierPool, text: str) -> None:
    before = pool.counts
    check(pool, Item("sympy", text, TaskAnswer()), {TIMEOUT, INFRA, ERROR}, text)
    now = pool.counts
    assert now.killed - before.killed == 1 or now.died - before.died == 2 or now == before
