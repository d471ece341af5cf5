"""What a worker process does: judge one item after the other until nobody asks any more.

Verdicts go back as JSON: what a worker may have become, nothing of it is unpickled in the driver.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from megasharp.orphans import end_with_parent
from megasharp.rewards.judge import Verifier, verify
from megasharp.sandbox.messages import PeerGone, receive, send
from megasharp.types import Outcome, TaskAnswer, Verdict

_MEGABYTE = 2**20
# A worker that has met its memory limit is in no state to go on.
_OUT_OF_MEMORY = 9


def work(peer: socket.socket, verifiers: Mapping[str, Verifier], memory_mb: int, parent: int) -> None:
    """A worker's life, in a process of its own; `memory_mb` is what it may take beyond what it starts with."""
    os.setsid()
    end_with_parent(parent)
    _limit_memory(memory_mb)
    while True:
        try:
            task, text, answer = pickle.loads(receive(peer))
            send(peer, encode(_verdict(verifiers[task], text, answer)))
        except PeerGone:
            return
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)


def _verdict(verifier: Verifier, text: str, answer: TaskAnswer) -> Verdict:
    def unless_out_of_memory(text: str, answer: TaskAnswer) -> Verdict:
        try:
            return verifier(text, answer)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)

    return verify(unless_out_of_memory, text, answer)


def encode(verdict: Verdict) -> bytes:
    """A verdict as it travels."""
    fields = [verdict.outcome.value, verdict.reward, verdict.canonical_answer, verdict.detail]
    return json.dumps(fields).encode()


def decode(message: bytes) -> Verdict:
    """A verdict that has arrived."""
    outcome, reward, canonical, detail = json.loads(message)
    return Verdict(Outcome(outcome), reward, canonical, detail)


def _limit_memory(megabytes: int) -> None:
    """Address space counts, and torch alone maps gigabytes of it that it never touches."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + megabytes * _MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
