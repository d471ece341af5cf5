"""Sampling from a server of OpenAI's API: many calls at once, asked again where that helps, and one line where not.

Asked again are answers with status 408, 409, 425, 429 and from 500 on, broken connections, half answers and wrong
numbers of samples, after waits that double, or as long as the server's Retry-After says. Too many requests hold back
every call and count against none. A request that keeps failing while others are answered is not sampled (INFRA); where
nothing is answered at all, the evaluation ends, and what it has stored stays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread

from megasharp.common.errors import NotSampled, RunFailed, UserError
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.rollout.endpoint import Style
from megasharp.rollout.endpoint.dialect import Dialect, completions
from megasharp.rollout.endpoint.http_calls import KEY_VARIABLE, Address, Answer, Call, Failed, Late, Server
from megasharp.rollout.streaming import Asked, Ended, Stream, answered

# The request is at fault, not the server.
_REFUSALS = (400, 413, 422)
_AGAIN = (408, 409, 425, 429)
_CONTROL_S = 30.0
_CLOSE_S = 5.0
_LONGEST_WAIT_S = 60.0
# A server that asks to wait for longer, for instance until the next day, will not be waited for.
_MOST_RETRY_AFTER_S = 900.0
# OpenAI's code of an account that has nothing left: no wait helps.
_NO_MONEY = "insufficient_quota"
_REMEDY = "what was sampled is kept, and the same command goes on"


@dataclass(frozen=True, slots=True)
class Patience:
    """`failures` of one call after which it is given up, or two that took all of `limit_s`; the waits, which double."""

    failures: int = 8
    first_wait_s: float = 1.0
    limit_s: float = 1800.0
    # Without one answer in this time, too many requests are no longer waited for.
    silence_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """An endpoint as the command line names it; calls at once, and samples a call."""

    address: Address
    model: str
    style: Style = "chat"
    concurrency: int = 32
    samples_per_call: int = 1
    patience: Patience = Patience()


def model_of(server: Server, asked: str | None) -> str:
    """Return the model to ask for: the one that is named, or the only one that the server has.

    Raises UserError where the server cannot be reached or refuses the key, or does not have exactly one.
    """
    try:
        answer = server.ask("/models", None, _CONTROL_S)
    except Failed as error:
        raise UserError(f"--endpoint {server.address}: {error}") from None
    _check_access(server, answer)
    names: list[str] = []
    # Not every server lists its models.
    with suppress(Failed, KeyError, TypeError):
        names = [str(each["id"]) for each in answer.json()["data"]] if answer.status == 200 else []
    if asked is not None:
        return asked
    if len(names) != 1:
        said = f"it has {', '.join(names[:20])}" if names else "it does not say which it has"
        raise UserError(f"--endpoint {server.address}: name a model with --endpoint-model; {said}")
    return names[0]


def _check_access(server: Server, answer: Answer) -> None:
    if answer.status in (401, 403):
        key = "the key in" if server.has_key else "no key; put one into"
        raise UserError(f"{server.address}: status {answer.status}: {answer.message} ({key} {KEY_VARIABLE})")
    if 300 <= answer.status < 400:
        raise UserError(f"{server.address}: it redirects to {answer.location or 'another address'}; give that one")


class _Job:
    """A call for the samples of one request: waiting, or under way."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams) -> None:
        self.request = request
        self.sampling = sampling
        self.call = Call()
        self.future: Future[list[Completion]] = Future()
        self._lock = Lock()
        self._settled = False

    def brought(self, found: list[Completion]) -> None:
        """Take what the call has brought, unless nobody waits for it any more."""
        if self._settles():
            self.future.set_result(found)

    def failed(self, error: Exception) -> None:
        """Give the call up, and hang up."""
        if self._settles():
            self.future.set_exception(error)
        self.call.end()

    def _settles(self) -> bool:
        """Return True once: to the thread that settles the future."""
        with self._lock:
            first, self._settled = not self._settled, True
        return first


class _Parts:
    """Requests as calls for at most `size` samples each; their answers are put together again by `whole`."""

    def __init__(self, asked: Iterable[Asked], size: int) -> None:
        self._asked = asked
        self._size = size
        # Each call's request and first sample there, and the answers to each request's calls.
        self._places: dict[int, tuple[int, int]] = {}
        self._found: dict[int, dict[int, list[Completion] | None]] = {}

    def __iter__(self) -> Iterator[Asked]:
        numbers = count()
        for place, (request, sampling) in enumerate(self._asked):
            starts = range(0, len(request.seeds), self._size)
            self._found[place] = dict.fromkeys(starts)
            for start in starts:
                self._places[next(numbers)] = place, start
                yield replace(request, seeds=request.seeds[start : start + self._size]), sampling

    def whole(self, ended: Iterable[Ended]) -> Iterator[Ended]:
        """Yield each request when all of its calls have ended."""
        for number, some in ended:
            place, start = self._places.pop(number)
            self._found[place][start] = some
            parts = [part for part in self._found[place].values() if part is not None]
            if len(parts) == len(self._found[place]):
                del self._found[place]
                yield place, [one for part in parts for one in part]


class EndpointEngine:
    """Satisfies `Engine` and `StreamingEngine`; requests carry messages, or tokens where the style is `tokens`.

    Completions carry texts and numbers of tokens, and log-probs where these are the sampler's (`dialect.py`).
    """

    def __init__(self, server: Server, settings: EndpointSettings) -> None:
        self._server = server
        self._settings = settings
        self._dialect = Dialect(settings.style)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = Lock()
        self._jobs: set[_Job] = set()
        self._last_answer = time.monotonic()
        self._not_before = 0.0
        self._limited = 0
        self._answered: set[SamplingParams] = set()
        # The server's words on temperature 0, where it refuses that.
        self._no_greedy = ""
        self.filtered = self._uncounted = 0

    @property
    def version(self) -> int:
        """Weights are the server's own."""
        return 0

    @property
    def capacity(self) -> int:
        """Samples that are asked for at once."""
        return self._settings.concurrency * self._settings.samples_per_call

    @property
    def unknown(self) -> Sequence[str]:
        """The fields that the server has refused, by name; they are left out where they change nothing."""
        return sorted(self._dialect.unknown)

    def remarks(self) -> Iterator[str]:
        """Yield a line for each thing about the server that a reader of the results should know."""
        where = self._server.address
        if self.unknown:
            seedless = "; samples have no seeds" if "seed" in self.unknown else ""
            yield f"{where} does not take {', '.join(self.unknown)}: left out where that changes nothing{seedless}"
        if self._no_greedy:
            yield f"{where} refuses temperature 0, so there are no greedy figures: {self._no_greedy}"
        if self.filtered:
            yield f"{where}: its content filter cut {self.filtered} samples; they are judged as they stand"
        if self._uncounted:
            yield f"{where} does not count tokens: {self._uncounted} samples have a length of 0"

    def healthy(self) -> bool:
        """Return True; a server that is down is waited for."""
        return True

    def close(self) -> None:
        """End all calls, and wait for their threads, but not for long.

        A thread that drops the last reference to a tensor while the interpreter ends aborts the process: torch then
        waits for the GIL inside a destructor. The thread of a call that cannot be hung up, as while it looks up an
        address, holds no tensor.
        """
        self._end([*self._jobs])
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds.

        Raises UserError where the server refuses the key, the model, a setting or every prompt, RunFailed where it does
        not answer.
        """
        with self.stream([(request, sampling) for request in requests], self.capacity) as ended:
            done = dict(ended)
        return [done[place] for place in range(len(requests))]

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: float) -> Iterator[Iterator[Ended]]:
        """Sample requests as `generate` does, and answer each when its samples have ended.

        A call makes room as soon as it has ended, whatever else its request waits for. Calls go out in the order of
        their requests, so no more requests are open than calls.
        """
        parts = _Parts(asked, self._settings.samples_per_call)
        with Stream(self, parts, at_once, lambda: None) as stream:
            yield parts.whole(answered(stream, str(self._server.address), greedy_apart=True))

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Sample one request in one call; returns at once. The future raises what `generate` does, or NotSampled."""
        if sampling.memory_mu is not None:
            raise UserError(f"{self._server.address}: an endpoint has no memory network")
        job = _Job(request, sampling)
        with self._lock:
            self._jobs.add(job)
            if len(self._threads) < self._settings.concurrency:
                # Daemons: a call may take half an hour, which the end of this process must not wait for.
                self._threads.append(Thread(target=self._work, name="endpoint", daemon=True))
                self._threads[-1].start()
        self._queue.put(job)
        return job.future

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """End these requests: the server is hung up on, and nothing of them is kept."""
        wanted = {id(future) for future in futures}
        self._end([job for job in [*self._jobs] if id(job.future) in wanted])

    drop = abort

    def _end(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._jobs.discard(job)
            job.failed(NotSampled("ended"))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.future.done():
                try:
                    job.brought(self._sampled(job))
                except Exception as error:
                    job.failed(error)
            self._jobs.discard(job)

    def _sampled(self, job: _Job) -> list[Completion]:
        call, seeds, began, tries, spent = job.call, job.request.seeds, time.monotonic(), 0, 0
        most = self._settings.patience.failures
        while True:
            self._wait(call, self._not_before - time.monotonic())
            if self._no_greedy and job.sampling.temperature == 0.0:
                raise NotSampled(f"the server refuses it: {self._no_greedy}")
            dialect, late = self._dialect, False
            try:
                body = dialect.body(self._settings.model, job.request, job.sampling)
                answer = self._server.ask(dialect.path, body, self._settings.patience.limit_s, call)
                if answer.status == 200:
                    found = completions(answer.json(), seeds, job.sampling)
                    return self._taken(found, job.sampling)
                if self._goes_on(answer, dialect, job.sampling):
                    continue
                reason, wait_s = f"status {answer.status}: {answer.message}", answer.retry_after_s
            except Failed as error:
                reason, wait_s, late = str(error), None, isinstance(error, Late)
            tries += 1
            # A limit is long: twice is enough.
            spent += most // 2 if late else 1
            if spent >= most:
                tried = f"{tries} tries failed, the last: {reason}"
                if self._last_answer > began:
                    raise NotSampled(tried)
                raise RunFailed(f"{self._server.address}: {tried}; nothing else was answered meanwhile; {_REMEDY}")
            self._wait(call, wait_s if wait_s is not None else self._pause(tries))

    def _taken(self, found: list[Completion], sampling: SamplingParams) -> list[Completion]:
        with self._lock:
            self._answered.add(sampling)
            self._last_answer = time.monotonic()
            self._limited = 0
            self.filtered += sum(bool(one.cause) for one in found)
            self._uncounted += sum(bool(one.text) and not one.length for one in found)
        return found

    def _goes_on(self, answer: Answer, dialect: Dialect, sampling: SamplingParams) -> bool:
        """Return whether to ask again without counting a failure: in other words, or later.

        Raises UserError or NotSampled where asking again does not help.
        """
        _check_access(self._server, answer)
        if answer.retry_after_s is not None and answer.retry_after_s > _MOST_RETRY_AFTER_S:
            raise RunFailed(
                f"{self._server.address}: status {answer.status}: {answer.message}; it asks to wait for "
                f"{answer.retry_after_s:g} s; {_REMEDY}"
            )
        if answer.status in _REFUSALS:
            if dialect == self._dialect:
                self._learn(answer, dialect, sampling)
            # Another thread may have learned more meanwhile.
            return True
        if answer.status == 429 and _NO_MONEY not in answer.text:
            return self._held_back(answer)
        if _NO_MONEY in answer.text or (answer.status not in _AGAIN and answer.status < 500):
            raise UserError(f"{self._server.address}: status {answer.status}: {answer.message}")
        return False

    def _learn(self, answer: Answer, dialect: Dialect, sampling: SamplingParams) -> None:
        """Take from a refusal what is to be sent otherwise.

        Raises UserError where the server refuses a setting that was asked for, NotSampled where the request is at
        fault: others with these settings were answered.
        """
        refused = NotSampled(f"the server refuses it: {answer.message}")
        if sampling in self._answered:
            raise refused
        changed = dialect.without(answer, sampling)
        if changed is not None:
            with self._lock:
                self._dialect = Dialect(
                    changed.style,
                    max(changed.limit, self._dialect.limit, key=len),
                    changed.unknown | self._dialect.unknown,
                )
            return
        named = dialect.refused(answer, sampling)
        if sampling.temperature == 0.0 and "temperature" in named:
            self._no_greedy = answer.message
        elif named:
            raise UserError(f"{self._server.address} refuses {', '.join(sorted(named))}: {answer.message}")
        raise refused

    def _held_back(self, answer: Answer) -> bool:
        """Hold back all calls for as long as the server asks, or for waits that double. Raises RunFailed in the end."""
        now = time.monotonic()
        with self._lock:
            silent_s = now - self._last_answer
            if self._not_before <= now:
                self._limited += 1
            wait_s = self._pause(self._limited) if answer.retry_after_s is None else answer.retry_after_s
            self._not_before = max(self._not_before, now + wait_s)
        if silent_s > self._settings.patience.silence_s:
            raise RunFailed(
                f"{self._server.address}: status 429 for {silent_s:.0f} s: {answer.message}; lower --concurrency, or "
                f"try later; {_REMEDY}"
            )
        return True

    def _pause(self, failures: int) -> float:
        """Seconds; scattered, so that calls that failed together do not come back together."""
        doubled = self._settings.patience.first_wait_s * 2.0 ** min(failures - 1, 10)
        return min(_LONGEST_WAIT_S, doubled) * random.uniform(0.5, 1.0)

    def _wait(self, call: Call, seconds: float) -> None:
        if call.ended.wait(max(0.0, seconds)):
            raise NotSampled("ended")
