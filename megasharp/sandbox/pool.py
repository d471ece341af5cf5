"""A pool of worker processes in which verifiers run, for those that may hang, crash or eat memory.

The limit on an item's time is the driver's: it kills the worker with everything that it has started, and puts a new one
in its place. Nothing depends on a signal's handler, which C code (sympy's, a regular expression's) never comes to run,
and which is refused outside of the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from megasharp.rewards.judge import Item
from megasharp.sandbox.messages import PeerGone
from megasharp.sandbox.nursery import MakeVerifiers
from megasharp.sandbox.workers import Nursery, Worker
from megasharp.types import Outcome, Verdict

MEMORY_MB = 4096
_TRIES = 2


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What happened in a pool. `killed` workers took too long, `died` ended by themselves; `retried` items of those
    were judged again.

    Example: `PoolCounts(killed=2, died=1, retried=1)`: two items were TIMEOUT, one worker was lost over a third.
    """

    killed: int = 0
    died: int = 0
    retried: int = 0


class VerifierPool:
    """Satisfies `rewards.judge.Judge` with `workers` processes; `make` gives the verifiers, in a process of its own.

    An item has `timeout_s` seconds of wall time, after which it is TIMEOUT. One whose worker dies is judged once more
    by a new one, and is INFRA when that dies too. `memory_mb` is what a worker may take beyond what it starts with.
    Workers end with this process however it ends.

    Raises UserError where the verifiers cannot be made.
    """

    def __init__(
        self,
        make: MakeVerifiers,
        tasks: Collection[str],
        workers: int,
        timeout_s: float,
        *,
        memory_mb: int = MEMORY_MB,
        log: Path | None = None,
    ) -> None:
        assert workers > 0
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._nurse: Callable[[], Nursery] = lambda: Nursery(make, memory_mb, log)
        self._lock = threading.Lock()
        self._counts = PoolCounts()
        self._closed = False
        self._nursery = self._nurse()
        # None stands for a worker that is to be made, by whoever takes its place.
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
        """Since the start."""
        return self._counts

    @property
    def nursery(self) -> int:
        """The process that workers come from, and with them all that they start."""
        return self._nursery.number

    def verdicts(self, items: Sequence[Item]) -> list[Verdict]:
        """One for each item, in order; safe to call from several threads."""
        futures = [self._threads.submit(self._judge, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all workers; what is being judged is given up."""
        with self._lock:
            self._closed = True
            nursery = self._nursery
        nursery.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.close()

    def _judge(self, item: Item) -> Verdict:
        worker = self._idle.get()
        try:
            for attempt in range(_TRIES):
                try:
                    worker = worker or self._worker()
                    return worker.ask(item, self._timeout_s)
                except TimeoutError:
                    _end(worker)
                    worker = None
                    self._count(killed=1)
                    return Verdict(Outcome.TIMEOUT, 0.0, detail=f"no verdict in {self._timeout_s:g} s")
                except PeerGone:
                    _end(worker)
                    worker = None
                    if self._closed:
                        raise CancelledError from None
                    self._count(died=1, retried=int(attempt + 1 < _TRIES))
            return Verdict(Outcome.INFRA, 0.0, detail=f"its worker process died {_TRIES} times")
        finally:
            self._idle.put(worker)

    def _worker(self) -> Worker:
        nursery = self._nursery
        try:
            return nursery.worker()
        except PeerGone:
            return self._instead_of(nursery).worker()

    def _instead_of(self, lost: Nursery) -> Nursery:
        """A new nursery, made by the first who finds that the old one is lost."""
        with self._lock:
            if self._closed:
                raise PeerGone("the pool is closed")
            if self._nursery is lost:
                lost.close()
                self._nursery = self._nurse()
            return self._nursery

    def _count(self, *, killed: int = 0, died: int = 0, retried: int = 0) -> None:
        with self._lock:
            was = self._counts
            self._counts = PoolCounts(was.killed + killed, was.died + died, was.retried + retried)


def _end(worker: Worker | None) -> None:
    """End a worker, which leaves none in its place."""
    if worker is not None:
        worker.end()
