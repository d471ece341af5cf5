"""What the loop asks of an engine: sampling, one batch at a time or many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from megasharp.common.records import Completion, GenerateRequest, SamplingParams


class Engine(Protocol):
    """Anything that samples; how weights reach it is `sync`'s matter."""

    @property
    def version(self) -> int:
        """The policy version being served; -1 before the first weights."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """Sample every request; the outer list follows `requests`, the inner one each request's seeds."""
        ...

    def healthy(self) -> bool:
        """Whether the engine can serve now."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class AsyncEngine(Engine, Protocol):
    """An engine that samples many requests at once, each answered when it is done."""

    @property
    def retried(self) -> int:
        """How many requests were sent again because an engine failed over them, since the start."""
        ...

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Sample one request; returns at once. The completions follow the request's seeds.

        The future raises NotSampled where no engine samples the request, UserError for what ends the run.
        """
        ...

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        """End these requests and wait until they are done: unfinished completions keep their tokens, and say ABORT."""
        ...
