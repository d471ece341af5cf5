"""Worker processes of the pool: the clean process that forks them, a worker's loop, and the messages between them.

The clean process (the zygote) has one thread, has imported what verifiers need, and waits. Forking it costs
milliseconds where a new interpreter would import for seconds, and a killed worker must be replaced at once. It kills
workers too, with whatever they started: only their parent knows that a process id is still theirs, and orphans come to
it (it is their subreaper). It ends when the driver's end of its socket closes, however that happens, and the kernel
ends the workers with it.

A worker sets up what a user's own reward needs, says so, and judges one call's items after the other's until its socket
closes. Its verdicts are JSON: a verifier may have changed
its process into anything, so the driver unpickles nothing of it.

A message is a length and then so many bytes, sent and received whole, or not at all, before a deadline. The deadline
holds for sending too: a stopped process that reads nothing blocks no sender.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megasharp.common.errors import one_line
from megasharp.common.parent_death import end_with_parent
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.judge import Item, ItemVerifier, Verifiers, verdicts_of

_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20


class PeerGone(Exception):
    """The process at the other end has ended, or closed its end."""


def send(peer: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send a message. `deadline` is in seconds of time.monotonic(); raises TimeoutError there, and PeerGone."""
    for part in (_LENGTH.pack(len(message)), message):
        _limit(peer, deadline)
        try:
            peer.sendall(part)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error


def receive(peer: socket.socket, deadline: float | None = None) -> bytes:
    """Receive a message. `deadline` is in seconds of time.monotonic(); raises TimeoutError there, and PeerGone."""
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, deadline))
    return _exactly(peer, length, deadline)


def _exactly(peer: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        _limit(peer, deadline)
        try:
            part = peer.recv(min(_PIECE, length - len(parts)))
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("closed its end")
        parts += part
    return bytes(parts)


def _limit(peer: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        peer.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    peer.settimeout(left)


_MEGABYTE = 2**20
# A worker that has met its memory limit is in no state to go on.
OUT_OF_MEMORY = 9
# A worker's first message, where it has something to close at its end.
CLOSES = b"closes"


def work(peer: socket.socket, verifiers: Verifiers, memory_mb: int, parent: int) -> None:
    """Judge items until the driver closes its end; `memory_mb` is the limit beyond what the process starts with.

    A worker has a process of its own, which ends with it.
    """
    os.setsid()
    end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = [each for each in verifiers.values() if isinstance(each, ItemVerifier)]
    for each in own:
        # It fails again when it is called, where its error is a verdict.
        with suppress(BaseException):
            each.set_up()
    # Address space is what can be limited, and torch alone maps gigabytes of it that it never touches.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + memory_mb * _MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        send(peer, CLOSES if own else b"")
        while True:
            order = pickle.loads(receive(peer))
            task, items = order[0], [Item(order[0], *parts) for parts in order[1]]
            send(peer, encode(verdicts_of(verifiers[task], items, (MemoryError,))))
    except PeerGone:
        for each in own:
            each.close()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def encode(verdicts: Sequence[Verdict]) -> bytes:
    """Write verdicts as a message."""
    found: list[list[object]] = []
    for each in verdicts:
        found.append([each.outcome, each.reward, each.canonical_answer, each.detail, each.failure])
        if each.parts:
            found[-1].append(dict(each.parts))
    return json.dumps(found).encode()


_OUTCOMES = {each.value: each for each in Outcome}


def decode(message: bytes) -> list[Verdict]:
    """Read verdicts from a message."""
    return [Verdict(_OUTCOMES[outcome], *others) for outcome, *others in json.loads(message)]


_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 5.0
_LOOK_S = 0.002
# The pause between two searches for orphans, left by programs of a worker that lives on.
_SWEEP_S = 0.2

MakeVerifiers = Callable[[], Verifiers]


def main(descriptor: int) -> None:
    """Serve the driver at the other end of the socket `descriptor`."""
    driver = socket.socket(fileno=descriptor)
    # Slurm sends it to all of a job, and the driver alone decides when workers end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(PeerGone):
        order = receive(driver)
        try:
            make, memory_mb = pickle.loads(order)
            verifiers = make()
        except Exception as error:
            send(driver, f"{type(error).__name__}: {one_line(error)}".encode())
            return
        send(driver, b"")
        _Zygote(driver, verifiers, memory_mb).serve()


class _Zygote:
    """Answers the driver: `fork` with a socket gives a worker's number, `kill` and its number ends it."""

    def __init__(self, driver: socket.socket, verifiers: Verifiers, memory_mb: int) -> None:
        self._driver = driver
        self._verifiers = verifiers
        self._memory_mb = memory_mb
        self._workers: set[int] = set()

    def serve(self) -> None:
        try:
            while True:
                self._sweep()
                if not select.select([self._driver], [], [], _SWEEP_S)[0]:
                    continue
                order = receive(self._driver)
                if order == b"fork":
                    send(self._driver, str(self._fork()).encode())
                else:
                    send(self._driver, str(self._kill(int(order.split()[1]))).encode())
        finally:
            for worker in list(self._workers):
                self._kill(worker)

    def _fork(self) -> int:
        _, (descriptor,), _, _ = socket.recv_fds(self._driver, 1, 1)
        peer = socket.socket(fileno=descriptor)
        parent = os.getpid()
        worker = os.fork()
        if worker == 0:
            try:
                self._driver.close()
                work(peer, self._verifiers, self._memory_mb, parent)
            finally:
                os._exit(0)
        peer.close()
        self._workers.add(worker)
        return worker

    def _kill(self, worker: int) -> int:
        """End a worker with its process group, then all orphans that have come to this process.

        Returns its exit code, or minus the number of the signal that ended it; its own where it had ended before.
        """
        with suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        with suppress(ProcessLookupError):
            # It may not have a group of its own yet.
            os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        self._workers.discard(worker)
        deadline = time.monotonic() + _GONE_S
        while self._sweep() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return os.waitstatus_to_exitcode(status)

    def _sweep(self) -> bool:
        """End the orphans that there are now; returns True where there were some."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        orphans = set(map(int, children.split())) - self._workers
        for orphan in orphans:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)
        return bool(orphans)
