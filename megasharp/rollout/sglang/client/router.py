"""Requests to engines: a request's responses, one by one, each to an engine that has room for it, and elsewhere if that
dies.

A request is fanned out into its responses and gathered in its one future. `admission.py` says which engine gets a
response and when; here is how it gets there and comes back. Responses of a prompt go where its cache is. Those that
were begun come first, the longest first, then those of prompts that had the longest responses, then as they were asked
for.

All of it runs in one thread, in an event loop: a large fleet has tens of thousands of responses under way, too many for
a thread each. What is public may be called from any other thread.

Time limits are kept by the engines (`engine/requests.py`), which alone know when a response began. A response that ends
there without a token is sent again, as one whose engine failed is.

Not SGLang's own router: it forwards only the request's fields that it knows, and `custom_params` is not among them, so
a request for mu would be sampled without it, unnoticed. `docs/explanation/sglang.md` has what was tried.
"""

from __future__ import annotations

import asyncio
import math
import resource
import threading
import time
import uuid
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megasharp.common.errors import EnginesLost, NotSampled, RunFailed
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Routing, SamplingParams
from megasharp.rollout.sglang.client.admission import Lengths, Load, bounds, choose
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, Limits, Refused
from megasharp.rollout.sglang.client.members import Member, Members

# An engine answers an aborted request at its next step; on a CPU a long prefill may come first.
_GRACE_S = 30.0
# SGLang forgets an abort that overtakes its request, so a request is this old before it is aborted by its name.
_ABORT_S = 0.3
_ABORTS_AT_ONCE = 32
# Samples that arrive together each compute their prompt: SGLang shares only what is cached already. So a prompt of this
# many tokens is read once, and then sampled. Measured: 8 samples of 600 tokens then compute 1 token each.
_READ_FIRST = 64
_LOOK_S = 0.5
# A response under way is a socket; the driver's other files need some too.
_MOST_FILES = 65_536
# Responses of several turns whose engine is remembered.
_MOST_KNOWN = 65_536
_OTHER_FILES = 512

Answer = Future[list[Completion]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """A response that was sent `attempts` times, and came back from none of the engines, is given up."""

    attempts: int = 3


@dataclass(eq=False)
class _Request:
    """One request on its way, and what has come back of it."""

    request: GenerateRequest
    sampling: SamplingParams
    # Its place among all, by when it came.
    number: int = 0
    answer: Answer = field(default_factory=Future)
    # Asked to end; no part of it is sent any more.
    ended: bool = False
    found: dict[int, Completion] = field(default_factory=dict)
    # Engines that have, or had, responses of it, and the reading of its prompt there.
    readings: dict[Member, asyncio.Task[Refused | None] | None] = field(default_factory=dict)

    def settle(self, answer: list[Completion] | BaseException) -> None:
        """Give the answer, unless there is one."""
        if self.answer.done():
            return
        if isinstance(answer, BaseException):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)

    def put(self, index: int, completion: Completion) -> None:
        """Take one response; the last gives the answer."""
        self.found[index] = completion
        if len(self.found) == len(self.request.seeds):
            self.settle([self.found[each] for each in range(len(self.request.seeds))])


@dataclass(eq=False)
class _Sample:
    """One response of a request. `avoid` is the engine that began nothing of it."""

    whole: _Request
    index: int
    begun: int
    attempts: int = 0
    avoid: Member | None = None
    name: str = ""
    sent: float = 0.0
    expected: float = 0.0
    # While it may be cancelled.
    task: asyncio.Task[None] | None = None

    def alone(self) -> GenerateRequest:
        """The request for this response only."""
        request = self.whole.request
        begun = (request.begun[self.index],) if self.begun else ()
        return GenerateRequest(request.tokens, (request.seeds[self.index],), begun)

    def unsampled(self) -> Completion:
        """Stands for it where no engine sampled it."""
        return Completion.unsampled(self.whole.request.seeds[self.index], self.whole.sampling)


@dataclass(eq=False)
class _Waiting:
    """Responses of one request that wait for room, those with the most tokens first; the lowest `order` comes first."""

    order: tuple[float, float, int]
    samples: deque[_Sample]

    @property
    def whole(self) -> _Request:
        return self.samples[0].whole


class Router:
    """Sends responses to the engines of a fleet. `retried` counts those sent again.

    `experts` describes those that engines return with each response; None: they return none.
    """

    def __init__(
        self, members: Members, settings: RouterSettings, limits: Limits, experts: Routing | None = None
    ) -> None:
        self.retried = 0
        self._retried_seeds: list[int] = []
        self._counting = threading.Lock()
        self._limits = limits
        self._experts = experts
        self._members = members
        self._settings = settings
        self._lengths = Lengths()
        self._requests: dict[Answer, _Request] = {}
        # From here on: of the loop's thread alone.
        self._waiting: list[_Waiting] = []
        self._under_way: dict[Member, set[_Sample]] = {}
        # Of responses of several turns, by their seeds, the engine of the turn before: its cache holds what is begun.
        self._turn_before: OrderedDict[int, Member] = OrderedDict()
        self._count = 0
        self._turn = 0
        self._number = 0
        self._most = _allow_files()
        self._admitting = False
        self._nobody_since: float | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()
        members.changed = lambda: self._call(self._look)

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        """Send a request. Its future raises NotSampled, EnginesLost, or RunFailed when no engine is left."""
        whole = _Request(request, request.under(sampling))
        self._requests[whole.answer] = whole
        whole.answer.add_done_callback(lambda answer: self._requests.pop(answer, None))
        self._call(self._take, whole)
        return whole.answer

    def abort(self, answers: Sequence[Answer]) -> None:
        """End these requests; returns when all are answered. Responses that no engine has yet are answered at once."""
        while waiting := self._unanswered(answers):
            asyncio.run_coroutine_threadsafe(self._end(waiting), self._loop).result()
            # Ask again those that have not answered: SGLang forgets an abort that overtakes its request.
            wait([whole.answer for whole in waiting], timeout=_ABORT_S)

    def drop(self, answers: Sequence[Answer]) -> None:
        """Send nothing of these requests that has not gone out yet; nobody waits for any."""
        self._call(self._end_waiting, self._unanswered(answers))

    def take_retried(self) -> list[int]:
        """Return the seeds of the responses sent again since the last call, each as often as it was."""
        with self._counting:
            taken, self._retried_seeds = self._retried_seeds, []
        return taken

    def close(self) -> None:
        """Take no more requests; those under way end without an answer."""
        self._call(self._loop.stop)
        self._thread.join()

    def _unanswered(self, answers: Sequence[Answer]) -> list[_Request]:
        found = [self._requests.get(answer) for answer in answers]
        return [whole for whole in found if whole is not None and not whole.answer.done()]

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # A loop that is closed has nothing left to do.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        watch = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(watch, *tasks, return_exceptions=True))
            for whole in list(self._requests.values()):
                whole.settle(RunFailed("the fleet was closed"))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._admit()

    def _look(self) -> None:
        """Engines have changed: what a lost one had is given up there, even if its machine never says so."""
        for member, samples in self._under_way.items():
            if not member.health.alive:
                for sample in samples:
                    if sample.task is not None:
                        sample.task.cancel()
                        sample.task = None
        self._admit_soon()

    def _take(self, whole: _Request) -> None:
        request = whole.request
        self._number += 1
        whole.number = self._number
        lengths = [len(tokens) for tokens in request.begun] or [0] * len(request.seeds)
        samples = [_Sample(whole, index, begun) for index, begun in enumerate(lengths)]
        if not samples:
            whole.settle([])
        self._wait(sorted((each for each in samples if each.begun), key=lambda each: -each.begun))
        self._wait([each for each in samples if not each.begun])

    def _wait(self, samples: Sequence[_Sample]) -> None:
        if samples:
            whole = samples[0].whole
            order = (-samples[0].begun, -(self._lengths.known(whole.request) or 0.0), whole.number)
            insort(self._waiting, _Waiting(order, deque(samples)), key=lambda each: each.order)
            self._admit_soon()

    def _admit_soon(self) -> None:
        """Once for all that happens at this moment."""
        if not self._admitting:
            self._admitting = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        """Send what there is room for."""
        self._admitting = False
        if not self._waiting:
            return
        # Weights come to engines that have no cache: they serve once all have one again.
        awake = [] if self._members.asleep else self._members.serving()
        serving = {member.load: member for member in awake}
        if not serving:
            self._give_up_where_nobody_comes()
            return
        self._nobody_since = None
        most, least = bounds(serving)
        for waiting in self._waiting:
            if self._count >= self._most or (most < 0 and least == math.inf):
                break
            # Of thousands that wait, hardly one has room when an answer comes: the others are passed over at once.
            while waiting.samples and self._count < self._most and self._may_fit(waiting.samples[0], most, least):
                member = self._place(waiting.samples[0], serving)
                if member is None:
                    break
                self._send(waiting.samples.popleft(), member)
                most, least = bounds(serving)
        self._waiting = [waiting for waiting in self._waiting if waiting.samples]

    def _give_up_where_nobody_comes(self) -> None:
        now = time.monotonic()
        self._nobody_since = self._nobody_since or now
        if not self._members.hopeful() or now - self._nobody_since > self._members.wait_limit:
            error = self._members.none_left()
            for waiting in self._waiting:
                waiting.whole.settle(error)
            self._waiting = []

    def _may_fit(self, sample: _Sample, most: float, least: float) -> bool:
        """Return False where no engine with such `bounds` takes the response, its prompt cached there or not."""
        whole = sample.whole
        sample.expected = self._lengths.expected(whole.request, sample.begun, whole.sampling)
        return sample.expected <= most or sample.expected + len(whole.request.tokens) >= least

    def _place(self, sample: _Sample, serving: dict[Load, Member]) -> Member | None:
        whole, length = sample.whole, len(sample.whole.request.tokens)
        loads = [load for load, member in serving.items() if member is not sample.avoid] or list(serving)
        homes = {member.load for member in whole.readings}
        if (before := self._turn_before.get(whole.request.seeds[sample.index])) is not None:
            homes.add(before.load)
        found = choose(loads, homes, lambda load: load.takes(whole, length, sample.expected))
        return None if found is None else serving[found]

    def _send(self, sample: _Sample, member: Member) -> None:
        whole = sample.whole
        member.load.add(whole, len(whole.request.tokens), sample.expected)
        self._turn += 1
        member.load.turn = self._turn
        self._under_way.setdefault(member, set()).add(sample)
        self._count += 1
        whole.readings.setdefault(member, None)
        # No name may be the beginning of another: SGLang would abort both.
        sample.name, sample.sent = uuid.uuid4().hex, time.monotonic()
        sample.attempts += 1
        sample.task = self._loop.create_task(self._carry(sample, member))

    async def _carry(self, sample: _Sample, member: Member) -> None:
        whole = sample.whole
        try:
            self._answered(sample, member, await self._ask(sample, member))
        except asyncio.CancelledError:
            if member.health.alive:
                raise
            self._failed(sample, member, "it was lost")
        except EngineFailed as error:
            sample.task = None
            if member.health.alive:
                # It may end a process, on another machine perhaps.
                await asyncio.to_thread(self._members.report_failure, member, error)
            self._failed(sample, member, str(error))
        except Exception as error:
            whole.settle(error)
        finally:
            member.load.remove(whole, len(whole.request.tokens), sample.expected)
            self._under_way[member].remove(sample)
            if not self._under_way[member]:
                del self._under_way[member]
            self._count -= 1
            self._admit_soon()

    async def _ask(self, sample: _Sample, member: Member) -> Completion | Refused:
        api, whole, limits = member.process.api, sample.whole, self._limits
        # The engine keeps the limits. This is for one that does not; retracted responses wait in it once more.
        late = limits.first_token_s + 2 * limits.response_s
        if len(whole.request.seeds) > 1 and len(whole.request.tokens) >= _READ_FIRST:
            refused = await self._read(whole, member, late)
            if refused is not None:
                return refused
        if whole.ended:
            return sample.unsampled()
        backstop = self._loop.call_later(late, lambda: self._loop.create_task(_abort(api, [sample.name])))
        try:
            answer = await api.generate(
                sample.alone(), whole.sampling, [sample.name], late + _GRACE_S, limits, self._experts
            )
        finally:
            backstop.cancel()
        return answer if isinstance(answer, Refused) else answer[0]

    async def _read(self, whole: _Request, member: Member, limit: float) -> Refused | None:
        """Have the engine read the prompt, once for all its responses there."""
        reading = whole.readings[member]
        if reading is None:
            read = member.process.api.read(whole.request.tokens, whole.sampling, uuid.uuid4().hex, limit + _GRACE_S)
            reading = whole.readings[member] = self._loop.create_task(read)
            # Perhaps nobody waits for it any more when it fails.
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        # One response that is cancelled does not end it for the others.
        return await asyncio.shield(reading)

    def _answered(self, sample: _Sample, member: Member, answer: Completion | Refused) -> None:
        whole = sample.whole
        if isinstance(answer, Refused):
            whole.settle(NotSampled(f"the engine refused it: {answer.message}"))
            return
        if answer.finish_reason is FinishReason.LENGTH:
            answer = _short_of_its_limit(answer, whole.sampling.max_tokens - sample.begun)
        aborted = answer.finish_reason is FinishReason.ABORT
        if aborted and not answer.tokens.numel() and not whole.ended and sample.attempts < self._settings.attempts:
            sample.avoid = member
            self._again(sample)
            return
        if not aborted:
            self._lengths.note(whole.request, sample.begun + answer.tokens.numel())
        if whole.request.episode is not None:
            seed = whole.request.seeds[sample.index]
            self._turn_before[seed] = member
            self._turn_before.move_to_end(seed)
            if len(self._turn_before) > _MOST_KNOWN:
                self._turn_before.popitem(last=False)
        whole.put(sample.index, answer)

    def _failed(self, sample: _Sample, member: Member, why: str) -> None:
        whole = sample.whole
        # The engine's cache of the prompt is lost, or in doubt.
        whole.readings.pop(member, None)
        if whole.ended:
            whole.put(sample.index, sample.unsampled())
        elif sample.attempts < self._settings.attempts:
            self._again(sample)
        else:
            whole.settle(EnginesLost(f"it was given up after several engines failed: {member.name}: {why}"))

    def _again(self, sample: _Sample) -> None:
        if not sample.whole.answer.done():
            with self._counting:
                self.retried += 1
                self._retried_seeds.append(sample.whole.request.seeds[sample.index])
            self._wait([sample])

    async def _end(self, requests: Iterable[_Request]) -> None:
        self._end_waiting(requests)
        await asyncio.gather(*(self._end_on(member) for member in list(self._under_way)))

    def _end_waiting(self, requests: Iterable[_Request]) -> None:
        for whole in requests:
            whole.ended = True
        for waiting in self._waiting:
            if waiting.whole.ended:
                for sample in waiting.samples:
                    sample.whole.put(sample.index, sample.unsampled())
                waiting.samples.clear()
        self._waiting = [waiting for waiting in self._waiting if waiting.samples]

    async def _end_on(self, member: Member) -> None:
        """End what is to end on one engine: in one call where that is all that it has."""
        api, samples = member.process.api, self._under_way.get(member)
        if samples is None:
            # Its last one was answered meanwhile.
            return
        ended = [sample for sample in samples if sample.whole.ended]
        if len(ended) < len(samples):
            now = time.monotonic()
            await _abort(api, [sample.name for sample in ended if now - sample.sent >= _ABORT_S])
            return
        # A response that is sent during the call would be aborted too.
        member.load.closed = True
        try:
            with suppress(EngineFailed):
                await api.abort()
        finally:
            member.load.closed = False
            self._admit_soon()


def _short_of_its_limit(answer: Completion, most: int) -> Completion:
    """Return a response that its engine cut before `most` new tokens as one that it ended: it has no room for more."""
    if answer.tokens.numel() >= most:
        return answer
    cause = (
        f"the engine cut it at {answer.tokens.numel()} of {most} new tokens, for want of room in its cache; raise "
        "max_total_tokens or mem_fraction_static in rollout.sglang, or lower the lengths"
    )
    return replace(answer, finish_reason=FinishReason.ABORT, cause=cause)


async def _abort(api: EngineApi, names: Sequence[str]) -> None:
    at_once = asyncio.Semaphore(_ABORTS_AT_ONCE)

    async def one(name: str) -> None:
        # An engine that does not take the abort does not answer the request either, and that is what counts.
        async with at_once:
            with suppress(EngineFailed):
                await api.abort(name)

    await asyncio.gather(*(one(name) for name in names))


def _allow_files() -> int:
    """Let this process have as many files as it may; returns the number of responses that may be under way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted - _OTHER_FILES)
