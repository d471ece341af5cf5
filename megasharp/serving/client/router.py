"""Requests to engines: each prompt goes to the engine with the fewest tokens in flight, and elsewhere if that dies.

A prompt's samples stay together on one engine, where they share the prompt's cache; a prompt is also what is retried.

Not SGLang's own router (sglang-router 0.3.2, tried): it forwards only the request's fields that it knows, and
`custom_params` is not among them, so a request for mu would be sampled without it and nobody told. It also takes one
sample per request, knows nothing of weight versions, and answers 500 while it still sends to an engine that has died.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from megasharp.serving.client.api import EngineApi, EngineFailed, Refused
from megasharp.serving.client.members import Member, Members
from megasharp.types import Completion, GenerateRequest, SamplingParams

# An engine answers an aborted request at its next step; on a CPU a long prefill may come first.
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """At most `at_once` prompts are in flight per engine; one over which `attempts` engines failed is given up.

    A prompt's samples have `request_limit` seconds on an engine, then they end with what they have.
    """

    at_once: int = 64
    request_limit: float = 1800.0
    attempts: int = 3


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A prompt that several engines were lost over."""

    reason: str


Outcome = list[Completion] | Refused | GivenUp


class LeastLoaded:
    """Sends prompts to the engines of a fleet."""

    def __init__(self, members: Members, settings: RouterSettings) -> None:
        self._members = members
        self._settings = settings

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[Outcome]:
        """What became of each request, in order. Raises UserError when no engine is left."""
        if not requests:
            return []
        threads = min(len(requests), len(self._members.all) * self._settings.at_once)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")
        try:
            futures = [pool.submit(self._one, request, sampling) for request in requests]
            return [future.result() for future in futures]
        finally:
            # After an error the rest need not run, and those under way may wait for their time limit.
            pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, request: GenerateRequest, sampling: SamplingParams) -> Outcome:
        tokens = len(request.tokens) + len(request.seeds) * sampling.max_tokens
        reason = ""
        for _ in range(self._settings.attempts):
            with self._members.busy(tokens, self._settings.at_once) as member:
                try:
                    return self._ask(member, request, sampling)
                except EngineFailed as error:
                    reason = f"{member.name}: {error}"
                    self._members.report_failure(member, error)
        return GivenUp(reason)

    def _ask(self, member: Member, request: GenerateRequest, sampling: SamplingParams) -> list[Completion] | Refused:
        api, limit = member.process.api, self._settings.request_limit
        name = uuid.uuid4().hex
        ids = [f"{name}-{index}" for index in range(len(request.seeds))]
        with _aborted_after(limit, api, ids):
            return api.generate(request.tokens, request.seeds, sampling, ids, limit + _GRACE_S)


@contextmanager
def _aborted_after(limit: float, api: EngineApi, ids: Sequence[str]) -> Iterator[None]:
    def abort() -> None:
        # An engine that does not take the abort does not answer the request either, and that is what counts.
        with suppress(EngineFailed):
            api.abort(ids)

    timer = threading.Timer(limit, abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
