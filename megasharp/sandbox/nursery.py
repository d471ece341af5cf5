"""The clean process that workers are forked from: it has one thread, has imported what verifiers need, and waits.

Forking it costs milliseconds where a new interpreter would import for seconds, and a worker that was killed is to be
replaced at once. It kills workers too, with whatever they started: only their parent knows that a process id is still
theirs, and orphans come to it (it is their subreaper). It ends when the driver's end of its socket closes, however that
happens, and the kernel ends the workers with it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from megasharp.errors import one_line
from megasharp.rewards.judge import Verifier
from megasharp.sandbox.messages import PeerGone, receive, send
from megasharp.sandbox.worker import work

_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 5.0
_LOOK_S = 0.002
# What a worker's programs leave behind while it lives on.
_SWEEP_S = 0.2

MakeVerifiers = Callable[[], Mapping[str, Verifier]]


def main(descriptor: int) -> None:
    """Serve the driver at the other end of the socket `descriptor`."""
    driver = socket.socket(fileno=descriptor)
    # Slurm sends it to all of a job: when workers end is the driver's to say.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(PeerGone):
        make, memory_mb = pickle.loads(receive(driver))
        try:
            verifiers = make()
        except Exception as error:
            send(driver, f"{type(error).__name__}: {one_line(error)}".encode())
            return
        send(driver, b"")
        _Nursery(driver, verifiers, memory_mb).serve()


class _Nursery:
    """Answers the driver: `fork` with a socket gives a worker's number, `kill` and its number ends it."""

    def __init__(self, driver: socket.socket, verifiers: Mapping[str, Verifier], memory_mb: int) -> None:
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
                    self._kill(int(order.split()[1]))
                    send(self._driver, b"")
        finally:
            for worker in list(self._workers):
                self._kill(worker)

    def _fork(self) -> int:
        _, (descriptor,), _, _ = socket.recv_fds(self._driver, 1, 1)
        peer = socket.socket(fileno=descriptor)
        parent = os.getpid()
        worker = os.fork()
        if worker == 0:
            self._be_worker(peer, parent)
        peer.close()
        self._workers.add(worker)
        return worker

    def _be_worker(self, peer: socket.socket, parent: int) -> None:
        try:
            self._driver.close()
            work(peer, self._verifiers, self._memory_mb, parent)
        finally:
            os._exit(0)

    def _kill(self, worker: int) -> None:
        """End a worker with its process group; then whatever else has come to this process as an orphan."""
        with suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
        with suppress(ProcessLookupError):
            # It may not have a group of its own yet.
            os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        self._workers.discard(worker)
        deadline = time.monotonic() + _GONE_S
        while self._sweep() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _sweep(self) -> bool:
        """End the orphans that there are now; returns whether there were any."""
        orphans = _children() - self._workers
        for orphan in orphans:
            _end(orphan)
        return bool(orphans)


def _children() -> set[int]:
    """This process's children, those that it inherited included."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return set(map(int, listed.split()))


def _end(orphan: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(orphan, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)
