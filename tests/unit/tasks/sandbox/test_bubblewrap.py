"""A machine without a sandbox gets one line, and a sandbox that opens holds."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from cases import each_case
from programs_to_judge import response
from waiting import HANG_S

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.tasks import code
from megasharp.tasks.code import CallTest, CodeAnswer, CodeVerifier, StdinTest
from megasharp.tasks.sandbox import bubblewrap, programs
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.programs import Clock, End, Ran, Sandbox, run


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("bubblewrap")


def tried(sandbox: Sandbox, program: str) -> Ran:
    clock = Clock(HANG_S, time.monotonic() + HANG_S)
    return run(sandbox, {"kind": "script", "preamble": "", "source": program}, b"", clock)


def test_bubblewrap_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match=r"^reward.sandbox: .* not installed; .* reward.sandbox=none, .*rights$"):
        open_sandbox("bubblewrap")


def test_bubblewrap_that_may_not_make_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    with pytest.raises(UserError, match=r"^reward.sandbox: .*No permissions to create new namespace.*=none.*$"):
        open_sandbox("bubblewrap")


@pytest.mark.long("sandbox")
def test_a_sandbox_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> None:
    """A bubblewrap that shares everything."""
    monkeypatch.setattr(bubblewrap, "_ways", lambda _: [Sandbox((), sandbox.python, (), alone=False)])
    with pytest.raises(UserError, match=r"it sees other processes|it has a network"):
        open_sandbox("bubblewrap")


@pytest.mark.long("sandbox")
def test_a_bubblewrap_that_is_older_than_an_option_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ordinary user's first way has the option, the second has not."""
    real, program = shutil.which("bwrap"), tmp_path / "bwrap"
    refuses = "for word; do case $word in --disable-userns) echo 'Unknown option' >&2; exit 1;; esac; done"
    program.write_text(f'#!/bin/sh\n{refuses}\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    assert "--disable-userns" not in open_sandbox("bubblewrap").prefix


@pytest.mark.long("sandbox")
def test_a_limit_on_memory_that_the_machine_does_not_keep_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = programs._limits

    def all_but_memory(sandbox: Sandbox) -> dict[str, tuple[int, int]]:
        return {name: each for name, each in limits(sandbox).items() if name != "RLIMIT_AS"}

    monkeypatch.setattr(programs, "_limits", all_but_memory)
    monkeypatch.setattr(bubblewrap, "own_folders", lambda: (Path("group"),))
    bubblewrap._note_once.cache_clear()
    open_sandbox("bubblewrap")
    assert capsys.readouterr().err == "", "a group keeps it"
    monkeypatch.setattr(bubblewrap, "own_folders", lambda: ())
    open_sandbox("bubblewrap")
    open_sandbox("bubblewrap")
    assert capsys.readouterr().err.count("keeps no limit on a process's memory (RLIMIT_AS) and makes no cgroups") == 1


@pytest.mark.long("sandbox")
@each_case(
    "program",
    [
        "open('/etc/passwd')",
        "import os\nos.symlink('/etc/passwd', '/tmp/link')\nopen('/tmp/link')",
        "open('/proc/1/root/etc/passwd')",
        f"open({str(Path(__file__).resolve())!r})",
        "open('/usr/lib/x', 'w')",
        "open('/x', 'w')",
        "open('/dev/x', 'w')",
        "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=2)",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=2)",
        "with open('/tmp/big', 'wb') as file:\n    file.write(bytes(17 * 2**20))",
        "for n in range(9):\n    open(f'/dev/shm/{n}', 'wb').write(bytes(15 * 2**20))",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "import os\nos.setuid(0)",
    ],
)
def test_what_a_program_must_not(sandbox: Sandbox, program: str) -> None:
    ran = tried(sandbox, program)
    assert (ran.end, ran.code) == (End.EXITED, 1), ran
    assert "Error" in ran.complaint


@pytest.mark.long("sandbox")
def test_what_a_program_may(sandbox: Sandbox) -> None:
    program = (
        "import os, threading\nopen('/tmp/x', 'w').write('1')\nopen('/dev/null', 'w').write('1')\n"
        "thread = threading.Thread(target=print, args=('done',))\nthread.start()\nthread.join()\n"
        "print(os.getcwd(), len(os.environ) < 10)"
    )
    assert tried(sandbox, program) == Ran(End.EXITED, 0, b"done\n/tmp True\n", "")


@pytest.mark.long("sandbox")
def test_nothing_of_this_process_goes_in(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "quokka")
    ran = tried(sandbox, "import os\nprint(os.environ, [os.readlink(f'/proc/self/fd/{n}') for n in range(3)])")
    assert b"quokka" not in ran.printed
    assert ran.printed.count(b"memfd") == 3


@pytest.mark.long("sandbox")
def test_root_becomes_nobody(sandbox: Sandbox) -> None:
    ran = tried(sandbox, "import os\nprint(os.getuid())")
    assert int(ran.printed) == (65534 if os.getuid() == 0 else os.getuid())


SEARCH = """
import gc, glob, os, sys
found = [repr(frame.f_locals) + repr(frame.f_globals) for frame in sys._current_frames().values()]
found += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (str, bytes, list, dict))]
for path in glob.glob("/proc/WHOSE/*") + glob.glob("/proc/WHOSE/fd/*") + glob.glob("/tmp/*"):
    if path.endswith(("cmdline", "environ")) or "/fd/" in path or "/tmp/" in path:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                found.append(repr(os.pread(handle, 1 << 24, 0)))
            finally:
                os.close(handle)
        except OSError:
            pass
secret = "".join(map(chr, [113, 117, 111, 107, 107, 97]))
assert not any(secret in text for text in found)
"""


@pytest.mark.long("sandbox")
@each_case(
    "answer",
    [
        CodeAnswer(stdin=(StdinTest("", "quokka"),)),
        CodeAnswer(function="f", calls=(CallTest((), '"quokka"'),)),
        CodeAnswer(function="f", check="def check(candidate):\n    assert candidate() == 'quokka'\n"),
    ],
    ids=["stdin", "call", "check"],
)
def test_expected_values_are_nowhere_where_a_program_could_look(
    sandbox: Sandbox, answer: CodeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "TEST_S", HANG_S)
    program = f"{SEARCH.replace('WHOSE', '*')}\ndef f():\n    return 1"
    verdict = CodeVerifier(sandbox, HANG_S)(response(program), answer)
    assert verdict.outcome is Outcome.WRONG, verdict


def test_the_search_above_finds_what_is_there() -> None:
    answer = CodeAnswer(stdin=(StdinTest("quokka", ""),))
    verdict = CodeVerifier(open_sandbox("none"), HANG_S)(response(SEARCH.replace("WHOSE", "self")), answer)
    assert verdict.outcome is Outcome.ERROR and "AssertionError" in verdict.detail
