"""Engines whose responses may have several turns: they sample with another engine, and environments answer.

Requests without an episode go to that engine as they are. With one, each response is sampled turn by turn, every turn
as the continuation of what the response is so far. With an engine that takes requests one by one (`AsyncEpisodes`)
responses go on independently of each other; with one that answers many at once (`RoundEpisodes`) all open turns are
sampled together, round by round.

Environments run in an event loop of its own thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from megasharp.common.errors import EnginesLost, NotSampled, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.config.rollout import EpisodesConfig
from megasharp.rollout.episodes.environment_calls import Calls, blocked_place
from megasharp.rollout.episodes.episode import EpisodeRun
from megasharp.rollout.episodes.observation_tokens import Encoder, ObservationTokens
from megasharp.rollout.step_request import AsyncEngine, Engine, streamed
from megasharp.rollout.streaming import Answer, Asked, Ended, Stream, answered, in_slices

_Result = TypeVar("_Result")
_Turns = TypeVar("_Turns", bound=Engine)
# Seconds between looks at signals while environments are waited for.
_LOOK_S = 0.5
# Seconds for environments to end at a run's end.
_END_S = 5.0


class EventLoop:
    """An event loop in a thread of its own, which no environment may block for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._limit_s = limit_s
        self._beat = time.monotonic()
        # The beat that was late, and when that was seen first.
        self._late: tuple[float, float] | None = None
        self._thread.start()
        self._loop.call_soon_threadsafe(self._beats)

    def begin(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Begin work; returns at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Do work to its end. Raises UserError where the loop is blocked."""
        if (blocked := self.blocked()) is not None:
            work.close()
            raise blocked
        future = self.begin(work)
        try:
            while not wait([future], _LOOK_S).done:
                if (blocked := self.blocked()) is not None:
                    raise blocked
            return future.result()
        finally:
            # Whoever leaves earlier, by a signal too, leaves no work behind.
            future.cancel()

    def blocked(self) -> UserError | None:
        """Return what to say where the loop is blocked for too long: no time limit can end a call that blocks.

        It takes two looks, because a process that was stopped for a while has late beats too.
        """
        beat, now = self._beat, time.monotonic()
        if now - beat <= self._limit_s + _LOOK_S:
            return None
        if self._late is None or self._late[0] != beat:
            self._late = (beat, now)
        if now - self._late[1] < _LOOK_S:
            return None
        return UserError(
            f"an environment blocks the event loop of all environments for longer than {self._limit_s:g} s "
            f"(rollout.episodes.step_timeout_s) at {blocked_place(self._thread.ident or 0)}; await what takes long, "
            "or write the method without async: it is then called in a thread of its own"
        )

    def _beats(self) -> None:
        self._beat = time.monotonic()
        self._loop.call_later(_LOOK_S, self._beats)

    def close(self) -> None:
        """End the thread and what has begun, whose environments have some seconds to give back what they hold."""
        if self._loop.is_closed():
            return
        patience_s = _LOOK_S if self.blocked() else _END_S + 2 * _LOOK_S
        ended = self.begin(self._ended())
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(patience_s)
        # One that is blocked is left alone: it keeps no process alive.
        if not self._thread.is_alive():
            self._loop.close()

    async def _ended(self) -> None:
        begun = asyncio.all_tasks() - {asyncio.current_task()}
        for task in begun:
            task.cancel()
        if begun:
            await asyncio.wait(begun, timeout=_END_S)


class _Episodes(Generic[_Turns]):
    """The parts of both engines. `turns` is the engine that samples single turns."""

    def __init__(self, turns: _Turns, tokenizer: Encoder, limits: EpisodesConfig) -> None:
        self.turns = turns
        self._encoder = ObservationTokens(tokenizer)
        self._limits = limits
        self._loop = EventLoop(limits.step_timeout_s)
        self._calls = Calls(limits)

    @property
    def version(self) -> int:
        """The policy version being served; -1 before the first weights."""
        return self.turns.version

    def healthy(self) -> bool:
        """Return True where the engine can serve now."""
        return self.turns.healthy()

    def close(self) -> None:
        """Free what the engine holds; what is under way is not waited for."""
        try:
            self.end()
        finally:
            self.turns.close()

    def end(self) -> None:
        """End what is here, and leave the engine to others."""
        self._loop.close()

    def _begun(self, request: GenerateRequest, sampling: SamplingParams) -> list[EpisodeRun]:
        return [
            EpisodeRun(request, index, sampling, self._encoder, self._limits, self._calls)
            for index in range(len(request.seeds))
        ]


class RoundEpisodes(_Episodes[Engine]):
    """Satisfies `Engine` and `StreamingEngine` with an engine that answers many requests at once."""

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds."""
        runs = [self._begun(request, sampling) if request.episode is not None else [] for request in requests]
        every = [*chain.from_iterable(runs)]
        plain = iter(self.turns.generate([one for one in requests if one.episode is None], sampling))
        try:
            self._loop.run(_all(run.begin() for run in every))
            while going := [run for run in every if not run.done]:
                # Nobody here needs to know which turns belong together.
                asked = [replace(run.request, episode=None) for run in going]
                sampled = self.turns.generate(asked, sampling)
                for run, (part,) in zip(going, sampled, strict=True):
                    run.take(part)
                self._loop.run(_all(run.answer() for run in going))
        finally:
            self._loop.run(_all(run.close() for run in every))
        return [[run.completion for run in own] if own else next(plain) for own in runs]

    @property
    def capacity(self) -> int:
        """Samples that are decoded at once."""
        return int(getattr(self.turns, "capacity", 1))

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does; those of environments in slices, because all of a slice take turns."""
        unread = iter(asked)
        first = next(unread, None)
        if first is not None and first[0].episode is None:
            with streamed(self.turns, chain([first], unread), at_once) as ended:
                yield ended
        else:
            yield in_slices(self.generate, chain([] if first is None else [first], unread), at_once)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all works, and raise the first error after all have ended."""
    for found in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


@runtime_checkable
class Served(AsyncEngine, Protocol):
    """The engines that `AsyncEpisodes` samples with; a fleet is one."""

    @property
    def capacity(self) -> int:
        """Samples that are decoded at once."""
        ...

    def drop(self, futures: Sequence[Answer]) -> None:
        """Send none of these that has not gone out yet; nobody waits for any."""
        ...

    def tend(self) -> None:
        """Look after the engines; to be called about every second while answers are waited for."""
        ...


@dataclass(eq=False)
class _Played:
    """The responses of one request on their way: the turns that are being sampled, and the calls of environments."""

    runs: list[EpisodeRun]
    answer: Answer = field(default_factory=Future)
    ended: bool = False
    sampled: set[Answer] = field(default_factory=set)
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class AsyncEpisodes(_Episodes[Served]):
    """Satisfies `AsyncEngine` and `StreamingEngine` with engines that take requests one by one."""

    def __init__(self, turns: Served, tokenizer: Encoder, limits: EpisodesConfig) -> None:
        super().__init__(turns, tokenizer, limits)
        self._played: dict[Answer, _Played] = {}
        # Environments that are given back while nobody waits.
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def capacity(self) -> int:
        """Samples that are decoded at once."""
        return self.turns.capacity

    @property
    def retried(self) -> int:
        """Number of turns sent again since the start, because an engine failed or began nothing of them."""
        return self.turns.retried

    def take_retried(self) -> list[int]:
        """Return the seeds of the turns sent again since the last call, each as often as it was."""
        return self.turns.take_retried()

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds."""
        with Stream(self, [(request, sampling) for request in requests], math.inf, self.tend) as stream:
            done = dict(answered(stream, "the engines"))
        return [done[place] for place in range(len(requests))]

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        """Sample requests, all with an episode or none; answer each when its samples have ended.

        Leaving the block ends what is in flight.
        """
        unread = iter(asked)
        first = next(unread, None)
        asked = chain([] if first is None else [first], unread)
        if first is not None and first[0].episode is None:
            with streamed(self.turns, asked, at_once) as ended:
                yield ended
        else:
            with Stream(self, asked, at_once, self.tend) as stream:
                yield answered(stream, "the engines")

    def tend(self) -> None:
        """Look after the engines, and at the environments. Raises UserError where one blocks all others."""
        self.turns.tend()
        if (blocked := self._loop.blocked()) is not None:
            raise blocked

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        """Sample one request; returns at once. The completions follow the request's seeds.

        The future raises NotSampled where the engines sample none of the responses, UserError for what ends the run.
        """
        if request.episode is None:
            return self.turns.submit(request, sampling)
        played = _Played(self._begun(request, sampling))
        self._played[played.answer] = played
        played.answer.add_done_callback(lambda answer: self._played.pop(answer, None))
        self._loop.begin(self._play_all(played, sampling))
        return played.answer

    def abort(self, futures: Sequence[Answer]) -> None:
        """End these requests and wait until they are done: unfinished completions keep their tokens, and say ABORT.

        A call of an environment is not waited for: where the response goes on, it is made again. Raises UserError where
        an environment blocks all others.
        """
        plain, played = self._split(futures)
        self.turns.abort([*plain, *self._loop.run(self._end(played))])
        while wait([each.answer for each in played], _LOOK_S).not_done:
            if (blocked := self._loop.blocked()) is not None:
                raise blocked

    def drop(self, futures: Sequence[Answer]) -> None:
        """Send none of these requests that has not gone out yet; nobody waits for any."""
        plain, played = self._split(futures)
        self.turns.drop([*plain, *self._loop.run(self._end(played))])

    def _split(self, futures: Sequence[Answer]) -> tuple[list[Answer], list[_Played]]:
        """Tell requests without an episode from those under way that have one."""
        found = [(future, self._played.get(future)) for future in futures]
        return (
            [future for future, played in found if played is None and not future.done()],
            [played for _, played in found if played is not None],
        )

    async def _end(self, some: Sequence[_Played]) -> list[Answer]:
        """Have no more turns sampled of these; return the turns that are being sampled."""
        for played in some:
            played.ended = True
            for call in played.calls:
                call.cancel()
        return [turn for played in some for turn in played.sampled]

    async def _play_all(self, played: _Played, sampling: SamplingParams) -> None:
        try:
            errors = await asyncio.gather(*(self._play(played, run, sampling) for run in played.runs))
            if all(errors) and (error := next(iter(errors), None)) is not None:
                raise error
            played.answer.set_result([run.completion for run in played.runs])
        except BaseException as error:
            played.ended = True
            played.answer.set_exception(error)

    async def _play(self, played: _Played, run: EpisodeRun, sampling: SamplingParams) -> NotSampled | None:
        """Play one response to its end; return the error of an engine that ended it before its first token."""
        lost = False
        try:
            await self._call(played, run.begin())
            while not run.done and not played.ended:
                turn = self.turns.submit(run.request, sampling)
                played.sampled.add(turn)
                try:
                    # Cancelling this task must not cancel an engine's future, which its engine answers.
                    (part,) = await asyncio.shield(asyncio.wrap_future(turn))
                except EnginesLost as error:
                    # A turn over which engines were lost is asked for once more.
                    if lost:
                        return run.give_up(error)
                    lost = True
                    continue
                except NotSampled as error:
                    return run.give_up(error)
                finally:
                    played.sampled.discard(turn)
                lost = False
                run.take(part)
                await self._call(played, run.answer())
        finally:
            closing = asyncio.ensure_future(run.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            if not played.ended:
                await closing
        return None

    async def _call(self, played: _Played, work: Coroutine[Any, Any, None]) -> None:
        """Do what calls an environment, unless and until the request is ended."""
        if played.ended:
            work.close()
            return
        call = asyncio.ensure_future(work)
        played.calls.add(call)
        try:
            await call
        except asyncio.CancelledError:
            if not played.ended:
                raise
        finally:
            played.calls.discard(call)


def with_episodes(engine: Engine, tokenizer: Encoder, limits: EpisodesConfig) -> RoundEpisodes | AsyncEpisodes:
    """Return an engine that plays episodes with this one."""
    if isinstance(engine, Served):
        return AsyncEpisodes(engine, tokenizer, limits)
    return RoundEpisodes(engine, tokenizer, limits)
