"""Batches of requests to an engine that takes them one by one: the next batch begins before the last one is whole.

A batch that is waited for until its slowest response leaves the engine idle for most of that time. So requests of one
batch further go out as soon as there is room, and batches are still answered whole and in order. Seeds fix responses,
so what is answered does not depend on it. At a batch's end no later one is further back than if it had waited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol

from megasharp.common.errors import NotSampled
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.common.signals import SaveAsked, held

Answer = Future[list[Completion]]
Batch = tuple[Sequence[GenerateRequest], SamplingParams]
# Of one request.
Sampled = list[Completion] | NotSampled

# The batch that is waited for, and the next.
_OPEN = 2
# How often the engine is seen to while answers are waited for.
_LOOK_S = 1.0


class Takes(Protocol):
    """An engine that takes requests one by one."""

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        """Sample one request; returns at once."""
        ...

    def abort(self, futures: Sequence[Answer]) -> None:
        """End these requests and wait until they are done."""
        ...

    def drop(self, futures: Sequence[Answer]) -> None:
        """Send none of these that has not gone out yet; nobody waits for any."""
        ...


class _Open:
    """A batch on its way."""

    def __init__(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        self.requests = requests
        self.sampling = sampling
        self.sent = 0
        self.answers: dict[int, Sampled] = {}

    @property
    def whole(self) -> bool:
        return len(self.answers) == len(self.requests)


class Stream:
    """Answers batches in order, with at most `at_once` samples in flight; a larger request goes out alone.

    It ends what is in flight where `SaveAsked` leaves its block: the run goes on for a while, and engines that share
    the learners' devices must be idle then. After another error nobody waits. `look` is called about every second.
    """

    def __init__(self, engine: Takes, batches: Iterable[Batch], at_once: float, look: Callable[[], None]) -> None:
        self._engine = engine
        self._unopened = iter(batches)
        self._at_once = at_once
        self._look = look
        self._looked = time.monotonic()
        self._open: deque[_Open] = deque()
        self._in_flight: dict[Answer, tuple[_Open, int]] = {}
        self._samples = 0
        self._answered: SimpleQueue[Answer] = SimpleQueue()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, SaveAsked):
            self._engine.abort([*self._in_flight])
        elif self._in_flight:
            self._engine.drop([*self._in_flight])

    def __iter__(self) -> Iterator[tuple[Batch, list[Sampled]]]:
        """Yield each batch with what was sampled for its requests, in their order.

        Raises what an answer raises, except NotSampled, which is one.
        """
        self._send()
        while self._open:
            while not self._open[0].whole:
                self._take()
                self._send()
            batch = self._open.popleft()
            # While the caller is busy with this batch, the engine is with the next.
            self._send()
            yield (batch.requests, batch.sampling), [batch.answers[place] for place in range(len(batch.requests))]

    def _send(self) -> None:
        with held():
            while len(self._open) < _OPEN and (batch := next(self._unopened, None)) is not None:
                self._open.append(_Open(*batch))
            for one in self._open:
                while one.sent < len(one.requests):
                    request = one.requests[one.sent]
                    if self._in_flight and self._samples + len(request.seeds) > self._at_once:
                        return
                    future = self._engine.submit(request, one.sampling)
                    self._in_flight[future] = one, one.sent
                    self._samples += len(request.seeds)
                    one.sent += 1
                    future.add_done_callback(self._answered.put)

    def _take(self) -> None:
        """Wait for an answer, or until it is time to look after the engine."""
        try:
            future = self._answered.get(timeout=_LOOK_S)
        except Empty:
            pass
        else:
            batch, place = self._in_flight.pop(future)
            self._samples -= len(batch.requests[place].seeds)
            try:
                batch.answers[place] = future.result()
            except NotSampled as error:
                batch.answers[place] = error
        if time.monotonic() - self._looked >= _LOOK_S:
            with held():
                self._look()
            self._looked = time.monotonic()
