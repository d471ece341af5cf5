"""Requests to engines: each prompt goes to the engine with the fewest tokens in flight, and elsewhere if that dies.

A prompt's samples stay together on one engine, where they share the prompt's cache; a prompt is also what is retried.

Not SGLang's own router: it forwards only the request's fields that it knows, and `custom_params` is not among them, so
a request for mu would be sampled without it, unnoticed. `docs/sglang.md` has what was tried.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from megasharp.common.errors import EnginesLost, NotSampled
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, Refused
from megasharp.rollout.sglang.client.members import Member, Members

# An engine answers an aborted request at its next step; on a CPU a long prefill may come first.
_GRACE_S = 30.0
# SGLang forgets an abort that overtakes its request, so a request is this old before it is aborted.
_ABORT_S = 0.3
_ABORTS_AT_ONCE = 32
# Samples that arrive together each compute their prompt: SGLang shares only what is cached already. So a prompt of this
# many tokens is read once, and then sampled. Measured: 8 samples of 600 tokens then compute 1 token each.
_READ_FIRST = 64

Answer = Future[list[Completion]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """At most `at_once` prompts are in flight per engine; one over which `attempts` engines failed is given up."""

    at_once: int = 64
    attempts: int = 3


class _Sending:
    """One request on its way: its answer, the engine that has it, and whether it is to end."""

    def __init__(self, request: GenerateRequest, sampling: SamplingParams) -> None:
        self.request = request
        self.sampling = sampling
        self.answer: Answer = Future()
        name = uuid.uuid4().hex
        self.names = [f"{name}-{index}" for index in range(len(request.seeds))]
        self._lock = threading.Lock()
        self._api: EngineApi | None = None
        self._sent = 0.0
        self._ended = False

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it may come to occupy."""
        return len(self.request.tokens) + len(self.request.seeds) * self.sampling.max_tokens

    def unsampled(self) -> list[Completion]:
        """The answer to a request that was ended before an engine had it."""
        return [Completion.unsampled(seed, self.sampling) for seed in self.request.seeds]

    def go_to(self, api: EngineApi) -> bool:
        """Note its engine from now on; returns False where it is to end and need not go."""
        with self._lock:
            self._api, self._sent = api, time.monotonic()
            return not self._ended

    def forgo(self) -> None:
        """Do not send it, or not again; an engine that has it gets no abort."""
        with self._lock:
            self._ended = True

    def leave(self) -> None:
        """It is at no engine any more."""
        with self._lock:
            self._api = None

    def settle(self, answer: list[Completion] | BaseException) -> None:
        """Give the answer, unless there is one."""
        with self._lock:
            if self.answer.done():
                return
            if isinstance(answer, BaseException):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)

    def end(self) -> None:
        """End it where it is: an engine that has it gets an abort, and answers with what it has."""
        with self._lock:
            self._ended = True
            api, age = self._api, time.monotonic() - self._sent
        if api is None:
            self.settle(self.unsampled())
        elif age >= _ABORT_S:
            # An engine that does not take the abort does not answer the request either, and that is what counts.
            with suppress(EngineFailed):
                api.abort(self.names)


class LeastLoaded:
    """Sends prompts to the engines of a fleet. `retried` counts those sent again because an engine failed.

    A prompt's samples have `request_limit_s` seconds on an engine, then they end with what they have.
    """

    def __init__(self, members: Members, settings: RouterSettings, request_limit_s: float) -> None:
        self.retried = 0
        self._retried_seeds: list[int] = []
        self._request_limit_s = request_limit_s
        self._members = members
        self._settings = settings
        self._pool = ThreadPoolExecutor(len(members.all) * settings.at_once, thread_name_prefix="generate")
        self._sendings: dict[Answer, _Sending] = {}
        self._counting = threading.Lock()

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Answer:
        """Send a request. Its future raises NotSampled, EnginesLost, or UserError when no engine is left."""
        sending = _Sending(request, sampling)
        self._sendings[sending.answer] = sending
        self._pool.submit(self._carry, sending)
        return sending.answer

    def abort(self, answers: Sequence[Answer]) -> None:
        """End these requests; returns when all are answered. Requests that no engine has yet are answered at once."""
        waiting = self._unanswered(answers)
        while waiting:
            with ThreadPoolExecutor(min(_ABORTS_AT_ONCE, len(waiting)), thread_name_prefix="abort") as pool:
                list(pool.map(_Sending.end, waiting))
            # Ask again those that have not answered: SGLang forgets an abort that overtakes its request.
            wait([sending.answer for sending in waiting], timeout=_ABORT_S)
            waiting = [sending for sending in waiting if not sending.answer.done()]

    def drop(self, answers: Sequence[Answer]) -> None:
        """Send none of these requests that has not gone out yet; nobody waits for any."""
        for sending in self._unanswered(answers):
            sending.forgo()

    def take_retried(self) -> list[int]:
        """Return the seeds of the samples sent again since the last call, each as often as it was."""
        with self._counting:
            taken, self._retried_seeds = self._retried_seeds, []
        return taken

    def close(self) -> None:
        """Take no more requests; those under way end with the engines."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _unanswered(self, answers: Sequence[Answer]) -> list[_Sending]:
        found = [self._sendings.get(answer) for answer in answers]
        return [sending for sending in found if sending is not None and not sending.answer.done()]

    def _carry(self, sending: _Sending) -> None:
        try:
            sending.settle(self._one(sending))
        except BaseException as error:
            sending.settle(error)
        finally:
            del self._sendings[sending.answer]

    def _one(self, sending: _Sending) -> list[Completion]:
        reason = ""
        for attempt in range(self._settings.attempts):
            with self._members.busy(sending.tokens, self._settings.at_once) as member:
                try:
                    if not sending.go_to(member.process.api):
                        return sending.unsampled()
                    return self._ask(member, sending)
                except EngineFailed as error:
                    reason = f"{member.name}: {error}"
                    self._members.report_failure(member, error)
                finally:
                    sending.leave()
            if attempt + 1 < self._settings.attempts:
                with self._counting:
                    self.retried += 1
                    self._retried_seeds += sending.request.seeds
        raise EnginesLost(f"it was given up after several engines failed: {reason}")

    def _ask(self, member: Member, sending: _Sending) -> list[Completion]:
        api, limit, request = member.process.api, self._request_limit_s, sending.request
        refused: Refused | None = None
        if len(request.seeds) > 1 and len(request.tokens) >= _READ_FIRST:
            with _ended_after(limit, api, sending.names):
                refused = api.read(request.tokens, sending.sampling, sending.names[0], limit + _GRACE_S)
        if refused is None:
            with _ended_after(limit, api, sending.names):
                answer = api.generate(request, sending.sampling, sending.names, limit + _GRACE_S)
            if not isinstance(answer, Refused):
                return answer
            refused = answer
        raise NotSampled(f"the engine refused it: {refused.message}")


@contextmanager
def _ended_after(limit: float, api: EngineApi, names: Sequence[str]) -> Iterator[None]:
    def abort() -> None:
        with suppress(EngineFailed):
            api.abort(names)

    timer = threading.Timer(limit, abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
