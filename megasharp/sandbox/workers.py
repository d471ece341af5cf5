"""The driver's side of worker processes: making one, asking it for a verdict, ending it."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megasharp import signals
from megasharp.errors import UserError
from megasharp.rewards.judge import Item
from megasharp.sandbox.messages import PeerGone, receive, send
from megasharp.sandbox.nursery import MakeVerifiers
from megasharp.sandbox.worker import decode
from megasharp.types import Verdict

# Importing takes seconds, on a busy machine many.
_START_S = 300.0
_ORDER_S = 30.0
_END_S = 10.0
# Its modules are looked for where this process found its own, and nowhere else.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from megasharp.sandbox.nursery import main; main(int(sys.argv[1]))"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, nursery: Nursery, number: int, peer: socket.socket) -> None:
        self.number = number
        self._nursery = nursery
        self._peer = peer

    def ask(self, item: Item, seconds: float) -> Verdict:
        """Its verdict. Raises TimeoutError where there is none in `seconds`, and PeerGone where it ends."""
        deadline = time.monotonic() + seconds
        message = pickle.dumps((item.task, item.text, item.answer), protocol=pickle.HIGHEST_PROTOCOL)
        send(self._peer, message, deadline)
        return decode(receive(self._peer, deadline))

    def close(self) -> None:
        """Close the socket, by which an idle worker ends."""
        self._peer.close()

    def end(self) -> None:
        """End it at once, with everything that it has started."""
        self._peer.close()
        self._nursery.kill(self.number)


class Nursery:
    """The clean process (`nursery.py`) that workers come from; its output goes to `log`, or nowhere.

    Raises UserError where the verifiers cannot be made there.
    """

    def __init__(self, make: MakeVerifiers, memory_mb: int, log: Path | None) -> None:
        self._lock = threading.Lock()
        self._process, self._peer = _start(log)
        try:
            deadline = time.monotonic() + _START_S
            send(self._peer, pickle.dumps((make, memory_mb)), deadline)
            refusal = receive(self._peer, deadline).decode()
        except (PeerGone, TimeoutError) as error:
            self.close()
            where = f"; its log is {log}" if log else ""
            raise UserError(f"reward.workers: the process that workers come from did not start{where}") from error
        if refusal:
            self.close()
            raise UserError(f"reward.workers: the verifiers could not be made in a worker process: {refusal}")

    @property
    def number(self) -> int:
        """Its process id."""
        return self._process.pid

    def worker(self) -> Worker:
        """A new worker. Raises PeerGone where this process has ended, or does not answer."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                deadline = time.monotonic() + _ORDER_S
                send(self._peer, b"fork", deadline)
                socket.send_fds(self._peer, [b"+"], [theirs.fileno()])
                return Worker(self, int(receive(self._peer, deadline)), ours)
            except (PeerGone, OSError) as error:
                ours.close()
                raise PeerGone(str(error)) from error

    def kill(self, number: int) -> None:
        """End a worker, and everything that it has started; with this process its workers have ended anyway."""
        with self._lock, suppress(PeerGone, OSError):
            deadline = time.monotonic() + _ORDER_S
            send(self._peer, b"kill %d" % number, deadline)
            receive(self._peer, deadline)

    def close(self) -> None:
        """End it, and with it all workers."""
        self._peer.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
            return
        self._process.kill()
        self._process.wait()


def _start(log: Path | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), *sys.path]
    with theirs, open(log or os.devnull, "ab") as output, signals.held(), signals.kept_from_children():  # noqa: PTH123
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
    return process, ours
