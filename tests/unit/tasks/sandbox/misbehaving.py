"""Verifiers that do what verifiers should not, each at the word of the response."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.tasks.judge import Verifier

# Sums of this many terms take hours, in one call of C code.
ENDLESS = 10**13


def obey(text: str, _: TaskAnswer) -> Verdict:
    """CORRECT with what was found as the canonical answer."""
    word, _, rest = text.partition(" ")
    return Verdict(Outcome.CORRECT, 1.0, str(ACTIONS[word](rest)))


def _hang(_: str) -> None:
    sum(range(ENDLESS))


def _leave_a_child(path: str) -> None:
    """Hang, with a child in a session of its own, whose process id is written to `path`."""
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path(path).write_text(str(child.pid))
    time.sleep(3600)


def _begin(folder: str) -> None:
    """Hang in C code; a file of `folder` says that it is there."""
    Path(folder, str(os.getpid())).touch()
    sum(range(ENDLESS))


def _orphan(path: str) -> int:
    """Leave a process whose parent is gone; its process id is written to `path` by the parent: it may end at once."""
    shell = (
        "import subprocess; orphan = subprocess.Popen(['sleep', '3600'], start_new_session=True); "
        f"open({path!r}, 'w').write(str(orphan.pid))"
    )
    subprocess.run([sys.executable, "-c", shell], check=True)
    return os.getpid()


def _meet(folder: str) -> int:
    """Wait until two are there at once."""
    Path(folder, str(os.getpid())).touch()
    while (there := sum(1 for _ in Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    return there


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _die_once(path: str) -> str:
    if not Path(path).exists():
        Path(path).touch()
        os._exit(3)
    return "second time"


def _eat(megabytes: str) -> int:
    return len(bytearray(int(megabytes) * 2**20))


def _raise(_: str) -> None:
    raise ValueError("two\nlines")


def _threads(_: str) -> int:
    return sum(1 for _ in Path(f"/proc/{os.getppid()}/task").iterdir())


ACTIONS = {
    "echo": len,
    "limited": len,
    "pid": lambda _: os.getpid(),
    "zygote": lambda _: os.getppid(),
    "threads": _threads,
    "blocked": lambda _: sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "meet": _meet,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "begin": _begin,
    "child": _leave_a_child,
    "orphan": _orphan,
    "die": _die,
    "kill": _kill,
    "die_once": _die_once,
    "eat": _eat,
    "raise": _raise,
}


def make() -> dict[str, Verifier]:
    return {"obey": obey}


def refuse() -> dict[str, Verifier]:
    raise RuntimeError("no such\nlibrary")


def killed() -> dict[str, Verifier]:
    os.kill(os.getpid(), signal.SIGKILL)
    return make()


def ends() -> dict[str, Verifier]:
    os._exit(7)
