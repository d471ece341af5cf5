"""The processes of a run, by what they do in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import psutil

_WORKER = "megasharp.tasks.sandbox.worker"


def _is_driver(words: list[str]) -> bool:
    return {"megasharp.cli", "train"} <= set(words) and "--retries" not in words


def _judges(words: list[str]) -> bool:
    return any(_WORKER in word for word in words)


# The fork server of the sandbox and its workers have one command line.
_FOUND_BY: dict[str, Callable[[list[str]], bool]] = {
    "driver": _is_driver,
    # Ray adds the name of the method that runs.
    "rank": lambda words: words[0].startswith("ray::RankActor"),
    "engine": lambda words: "megasharp.rollout.sglang.engine" in words or words[0] == "sglang::scheduler",
    "raylet": lambda words: words[0].endswith("/raylet"),
    "fork server": _judges,
    "sandbox worker": _judges,
    "tracker": lambda words: "megasharp.metrics.trackers.follow" in words,
}
NAMES = tuple(_FOUND_BY)


def find(role: str) -> list[psutil.Process]:
    """Return the processes that have the role now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = process.cmdline()
            if words and words[0] and _FOUND_BY[role](words) and _is_asked_judge(process, role):
                found.append(process)
    return found


def _is_asked_judge(process: psutil.Process, role: str) -> bool:
    if role not in ("fork server", "sandbox worker"):
        return True
    parent = process.parent()
    forked = parent is not None and _judges(parent.cmdline() or [""])
    return forked == (role == "sandbox worker")


def pick(role: str, draw: random.Random) -> psutil.Process | None:
    """Draw one of the processes that have the role now; None where none has."""
    found = find(role)
    return draw.choice(found) if found else None
