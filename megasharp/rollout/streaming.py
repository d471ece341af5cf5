"""Requests to an engine that answers each when its samples have ended, in whatever order that is.

Engines are kept full: a request further on begins as soon as there is room, however long an earlier one takes. Seeds
fix samples, so neither the order nor what else is in flight changes one. `Stream` does it with an engine that takes
requests one by one; `in_slices` with one that only answers many together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol

from megasharp.common.errors import NotSampled, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.common.signals import SaveAsked, held

Answer = Future[list[Completion]]
Asked = tuple[GenerateRequest, SamplingParams]
# A request's place among those asked, and its completions.
Ended = tuple[int, list[Completion]]
# Of one request.
Sampled = list[Completion] | NotSampled
Generate = Callable[[Sequence[GenerateRequest], SamplingParams], list[list[Completion]]]

# How often the engine is seen to while answers are waited for.
_LOOK_S = 1.0


class Feed:
    """Requests in order, as there is room for their samples: at most `at_once`, or one larger request alone."""

    def __init__(self, asked: Iterable[Asked], at_once: float) -> None:
        self._unsent = enumerate(asked)
        self._next: tuple[int, Asked] | None = None
        self._at_once = at_once
        self._sizes: dict[int, int] = {}
        self._samples = 0

    def fresh(self) -> Iterator[tuple[int, Asked]]:
        """Yield those that there is room for, with their places."""
        while (following := self._next or next(self._unsent, None)) is not None:
            self._next = following
            place, (request, _) = following
            if self._sizes and self._samples + len(request.seeds) > self._at_once:
                return
            self._next = None
            self._sizes[place] = len(request.seeds)
            self._samples += len(request.seeds)
            yield following

    def ended(self, place: int) -> None:
        """Make room: a request was answered."""
        self._samples -= self._sizes.pop(place)


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


class Stream:
    """Asks in order, with at most `at_once` samples in flight; a larger request goes out alone.

    It ends what is in flight where `SaveAsked` leaves its block: the run goes on for a while, and engines that share
    the learners' devices must be idle then. After another error nobody waits. `look` is called about every second.
    """

    def __init__(self, engine: Takes, asked: Iterable[Asked], at_once: float, look: Callable[[], None]) -> None:
        self._engine = engine
        self._feed = Feed(asked, at_once)
        self._look = look
        self._looked = time.monotonic()
        self._in_flight: dict[Answer, tuple[int, Asked]] = {}
        self._answered: SimpleQueue[Answer] = SimpleQueue()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, SaveAsked):
            self._engine.abort([*self._in_flight])
        elif self._in_flight:
            self._engine.drop([*self._in_flight])

    def __iter__(self) -> Iterator[tuple[int, Asked, Sampled]]:
        """Yield each request's place, itself and what was sampled for it, as answers come.

        Raises what an answer raises, except NotSampled, which is one.
        """
        self._send()
        while self._in_flight:
            future = self._wait()
            if future is None:
                continue
            place, asked = self._in_flight.pop(future)
            self._feed.ended(place)
            sampled: Sampled
            try:
                sampled = future.result()
            except NotSampled as error:
                sampled = error
            # While the caller is busy with this one, the engine is with the next.
            self._send()
            yield place, asked, sampled

    def _send(self) -> None:
        with held():
            for place, asked in self._feed.fresh():
                future = self._engine.submit(*asked)
                self._in_flight[future] = place, asked
                future.add_done_callback(self._answered.put)

    def _wait(self) -> Answer | None:
        """Wait for an answer, or until it is time to look after the engine."""
        try:
            future = self._answered.get(timeout=_LOOK_S)
        except Empty:
            future = None
        if time.monotonic() - self._looked >= _LOOK_S:
            with held():
                self._look()
            self._looked = time.monotonic()
        return future


def answered(
    stream: Iterable[tuple[int, Asked, Sampled]],
    who: str,
    sends: Callable[[GenerateRequest], bool] = lambda _: True,
    *,
    greedy_apart: bool = False,
) -> Iterator[Ended]:
    """Answer with aborted completions what is refused: one prompt may be at fault.

    Raises UserError where `who` turns down all that it was sent, by `sends`. Until something is sampled, refusals are
    held back: whoever stores answers must not store these. With `greedy_apart` a greedy sample does not count for the
    others, whose settings `who` may refuse.
    """
    held_back: dict[bool, list[Ended]] = {}
    sampled: set[bool] = set()
    for place, (request, sampling), found in stream:
        greedy = greedy_apart and sampling.temperature == 0.0
        if isinstance(found, NotSampled):
            unsampled = [Completion.unsampled(seed, sampling, str(found)) for seed in request.seeds]
            held_back.setdefault(greedy, []).append((place, unsampled))
        else:
            sampled |= {greedy} if sends(request) else set()
            yield place, found
        for kind in (False, True):
            # Without any greedy sample there is still an evaluation.
            if kind in sampled or (kind and sampled):
                yield from held_back.pop(kind, ())
    if held_back:
        refused = [one for some in held_back.values() for one in some]
        raise UserError(f"{who} sampled none of {len(refused)} requests; the first: {refused[0][1][0].cause}")


def in_slices(generate: Generate, asked: Iterable[Asked], at_once: float) -> Iterator[Ended]:
    """Sample with an engine that answers many requests together: those that follow each other with one sampling.

    A slice has at most `at_once` samples; a larger request is one of its own.
    """
    first = 0
    requests: list[GenerateRequest] = []
    now: SamplingParams | None = None
    for request, sampling in asked:
        full = sum(len(one.seeds) for one in (*requests, request)) > at_once
        if now is not None and requests and (full or sampling != now):
            yield from enumerate(generate(requests, now), first)
            first, requests = first + len(requests), []
        now = sampling
        requests.append(request)
    if now is not None and requests:
        yield from enumerate(generate(requests, now), first)
