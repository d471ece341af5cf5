"""A pool of worker processes for verifiers that may hang, crash or eat memory: the driver's side.

The driver makes workers (`worker.py` is their side), asks them for verdicts and ends them. The limit on a call's time
is the driver's: it kills the worker with everything that it has started, and puts a new one in its place. Nothing
depends on a signal's handler, which never runs while C code does (sympy's, a regular expression's), and which cannot be
set outside of the main thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from megasharp.common import signals
from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import Outcome, Verdict
from megasharp.tasks.judge import Item, ItemVerifier, batches
from megasharp.tasks.sandbox.worker import CLOSES, OUT_OF_MEMORY, MakeVerifiers, PeerGone, decode, receive, send

# Importing takes seconds, on a busy machine many; and a user's reward may load a model.
_START_S = 300.0
_ORDER_S = 30.0
_END_S = 10.0
# Its modules are looked for where this process found its own, and nowhere else.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from megasharp.tasks.sandbox.worker import main; main(int(sys.argv[1]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, zygote: Zygote, number: int, peer: socket.socket) -> None:
        self.number = number
        self._zygote = zygote
        self._peer = peer
        self._hello: bytes | None = None

    def wait(self, seconds: float) -> None:
        """Wait until it is set up. Raises TimeoutError where it is not in `seconds`, and PeerGone where it ends."""
        if self._hello is None:
            self._hello = receive(self._peer, time.monotonic() + seconds)

    @property
    def is_set_up(self) -> bool:
        """True once it has said that it is set up."""
        return self._hello is not None

    def ask(self, items: Sequence[Item], seconds: float, whole: bool = False) -> list[Verdict]:
        """Return verdicts of one task's items, which travel `whole`, or as a text and an answer each.

        Raises TimeoutError where there are none in `seconds`, and PeerGone where it ends.
        """
        deadline = time.monotonic() + seconds
        parts = [
            (each.text, each.answer, each.prompt, each.turns, each.row, each.tokens)
            if whole
            else (each.text, each.answer)
            for each in items
        ]
        send(self._peer, pickle.dumps((items[0].task, parts), protocol=pickle.HIGHEST_PROTOCOL), deadline)
        return decode(receive(self._peer, deadline))

    def close(self) -> None:
        """Close the socket, by which an idle worker ends; one that has something to close has time for that."""
        if self._hello == CLOSES:
            with suppress(OSError, PeerGone, TimeoutError):
                self._peer.shutdown(socket.SHUT_WR)
                receive(self._peer, time.monotonic() + _END_S)
        self._peer.close()

    def end(self) -> int | None:
        """End it at once, with everything that it has started; returns how it ended, as far as that is known."""
        self._peer.close()
        return self._zygote.kill(self.number)


class Zygote:
    """The clean process (`worker.py`) that workers come from; its output goes to `log`, or nowhere.

    Raises UserError where the verifiers cannot be made there, RunFailed where something killed it meanwhile.
    """

    def __init__(self, make: MakeVerifiers, memory_mb: int, log: Path | None) -> None:
        self._lock = threading.Lock()
        self._process, self._peer = _start(log)
        try:
            deadline = time.monotonic() + _START_S
            send(self._peer, pickle.dumps((make, memory_mb)), deadline)
            refusal = receive(self._peer, deadline).decode()
        except TimeoutError as error:
            self.close(wait_s=0.0)
            raise RunFailed(_not_started(f"has not started in {_START_S:g} s", log)) from error
        except PeerGone as error:
            self.close()
            code = self._process.returncode
            # A process that is killed may start the next time; one that ended itself cannot import what it needs.
            kind = RunFailed if code < 0 else UserError
            raise kind(_not_started(f"ended while it started ({how_ended(code)})", log)) from error
        if refusal:
            self.close()
            raise UserError(f"reward.workers: the verifiers could not be made in a worker process: {refusal}")

    @property
    def number(self) -> int:
        """Its process id."""
        return self._process.pid

    def worker(self) -> Worker:
        """Fork a new worker. Raises PeerGone where this process has ended, or does not answer."""
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

    def kill(self, number: int) -> int | None:
        """End a worker, and everything that it has started; with this process its workers have ended anyway.

        Returns the worker's exit code, or minus the number of the signal that ended it; None where nobody knows.
        """
        with self._lock, suppress(PeerGone, OSError):
            deadline = time.monotonic() + _ORDER_S
            send(self._peer, b"kill %d" % number, deadline)
            return int(receive(self._peer, deadline))
        return None

    def close(self, wait_s: float = _END_S) -> None:
        """End it, and with it all workers."""
        self._peer.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
            return
        self._process.kill()
        self._process.wait()


def how_ended(code: int | None) -> str:
    """Return a process's end in words, from its exit code or minus the number of a signal.

    Example: `how_ended(-9)` is "killed by SIGKILL".
    """
    if code is None:
        return "nobody knows how"
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"


def _not_started(what: str, log: Path | None) -> str:
    where = f"; its log is {log}" if log else ""
    return f"reward.workers: the process that workers come from {what}{where}"


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


MEMORY_MB = 4096
_TRIES = 2


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Counts of a pool's failures. `killed` workers took too long, `died` ended by themselves; `retried` items of
    those were judged again.

    Example: `PoolCounts(killed=2, died=1, retried=1)`: two items were TIMEOUT, one worker was lost over a third.
    """

    killed: int = 0
    died: int = 0
    retried: int = 0


class VerifierPool:
    """A `Judge` with `workers` processes; `make` gives the verifiers, in a process of its own.

    An item has `timeout_s` seconds of wall time, after which it is TIMEOUT. One whose worker dies is judged once more
    by a new one, and is INFRA when that dies too. Both are failures, of the verifier or of this machine. Verifiers of
    whole items are in `own` too, by task: the items of a call share their seconds, and where it takes too long or its
    worker dies, each is judged alone. `memory_mb` is what a worker may take beyond what it is set up with. Workers end
    with this process however it ends.

    Raises UserError where the verifiers cannot be made, RunFailed where their process is killed.
    """

    def __init__(
        self,
        make: MakeVerifiers,
        tasks: Collection[str],
        workers: int,
        timeout_s: float,
        *,
        own: Mapping[str, ItemVerifier] | None = None,
        memory_mb: int = MEMORY_MB,
        log: Path | None = None,
    ) -> None:
        assert workers > 0
        self._tasks = tasks
        self._workers = workers
        self._own = own or {}
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._make_zygote: Callable[[], Zygote] = lambda: Zygote(make, memory_mb, log)
        self._lock = threading.Lock()
        self._counts = PoolCounts()
        self._closed = False
        self._zygote = self._make_zygote()
        # None stands for a worker that is still to be made, by the thread that takes it.
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")

    @property
    def tasks(self) -> Collection[str]:
        """The tasks whose responses it can judge."""
        return self._tasks

    @property
    def counts(self) -> PoolCounts:
        """The counts since the start."""
        return self._counts

    @property
    def zygote(self) -> int:
        """The id of the process that workers, and all that they start, come from."""
        return self._zygote.number

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """One for each item, in order; safe to call from several threads."""
        share = -(-len(items) // self._workers)
        left = deque(enumerate(batches(items, self._own, share)))
        found: dict[int, list[Verdict]] = {}

        def judge() -> None:
            while True:
                try:
                    number, batch = left.popleft()
                except IndexError:
                    return
                found[number] = self._judge(batch)

        # A future for each worker: one for each call would cost as much as the call.
        futures = [self._threads.submit(judge) for _ in range(min(self._workers, len(left)))]
        try:
            for future in futures:
                future.result()
            return [verdict for number in range(len(found)) for verdict in found[number]]
        finally:
            left.clear()
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all workers; items that are being judged are given up."""
        with self._lock:
            self._closed = True
            zygote = self._zygote
        # Those that judge nothing close what is theirs, while the process that they come from is there.
        for worker in [self._idle.get_nowait() for _ in range(self._idle.qsize())]:
            if worker is not None:
                worker.close()
            self._idle.put(None)
        zygote.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.close()

    def _judge(self, batch: list[Item]) -> list[Verdict]:
        verdicts = self._asked(batch)
        if verdicts is not None:
            return verdicts
        # One of them may be to blame; the others have what is theirs.
        return [verdict for item in batch for verdict in self._asked([item]) or []]

    def _asked(self, batch: list[Item]) -> list[Verdict] | None:
        """Return a call's verdicts; None where one of several items took too long, or ended the worker."""
        worker = self._idle.get()
        ended: int | None = None
        own = self._own.get(batch[0].task)
        seconds = self._timeout_s * len(batch)
        try:
            for attempt in range(_TRIES):
                try:
                    worker = worker or self._new_worker()
                    worker.wait(_START_S)
                    return worker.ask(batch, seconds, own is not None and own.reads_rows)
                except TimeoutError:
                    is_late = worker is not None and worker.is_set_up
                    late = f"no verdict in {self._timeout_s:g} s" if is_late else f"not set up in {_START_S:g} s"
                    _end(worker)
                    worker = None
                    self._count(killed=1)
                    # Not judged again: a verifier that hangs on an item hangs on it twice.
                    return [Verdict(Outcome.TIMEOUT, 0.0, detail=late, failure=late)] if len(batch) == 1 else None
                except PeerGone:
                    ended = _end(worker)
                    worker = None
                    if self._closed:
                        raise CancelledError from None
                    self._count(died=1, retried=len(batch) if attempt + 1 < _TRIES else 0)
                    if len(batch) > 1:
                        return None
            how = f"out of its {self._memory_mb} MB of memory" if ended == OUT_OF_MEMORY else how_ended(ended)
            died = f"its worker process died {_TRIES} times: {how}"
            return [Verdict(Outcome.INFRA, 0.0, detail=died, failure=died)]
        finally:
            self._idle.put(worker)

    def _new_worker(self) -> Worker:
        """Fork a worker; the first thread that finds the zygote lost puts another one in its place."""
        zygote = self._zygote
        try:
            return zygote.worker()
        except PeerGone:
            with self._lock:
                if self._closed:
                    raise PeerGone("the pool is closed") from None
                if self._zygote is zygote:
                    zygote.close()
                    self._zygote = self._make_zygote()
                replacement = self._zygote
            return replacement.worker()

    def _count(self, *, killed: int = 0, died: int = 0, retried: int = 0) -> None:
        with self._lock:
            was = self._counts
            self._counts = PoolCounts(was.killed + killed, was.died + died, was.retried + retried)


def _end(worker: Worker | None) -> int | None:
    """End a worker, where there is one; returns how it ended, as far as that is known."""
    return None if worker is None else worker.end()
