"""The narrow interfaces the loop knows. A back-end satisfies one of these; the loop never names a back-end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megasharp.types import Completion, GenerateRequest, SamplingParams, StepBatch, StepStats

if TYPE_CHECKING:
    from megasharp.algos.base import Needs
    from megasharp.algos.recipe import Recipe

NamedTensors = Iterable[tuple[str, Tensor]]

# A weight sync carries the memory network's weights under this prefix, the policy's under their plain names.
MEMORY_PREFIX = "memory."


class WeightSource(Protocol):
    """The learner's half of a weight sync."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once as (Hugging Face name, whole tensor on the CPU or the rank's device)."""
        ...


class WeightSink(Protocol):
    """The engine's half of a weight sync."""

    def load_weights(self, version: int, tensors: NamedTensors) -> None:
        """Take all weights of policy version `version`; the engine serves them when this returns.

        An engine that holds a memory network takes all of its weights too, under `MEMORY_PREFIX`.
        """
        ...


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


class Learner(WeightSource, Protocol):
    """The policy under training, whatever its parallelism."""

    def annotate(self, batch: StepBatch, needs: Needs) -> StepBatch:
        """Fill in old / reference log-probs and old entropies, where `needs` asks for them."""
        ...

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        """One optimizer step per mini-batch of `batch`; one whose gradient norm is above the limit is left out."""
        ...

    def set_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy."""
        ...

    def reset_optimizer(self) -> None:
        """Forget moments and step count; weights stay."""
        ...

    def offload(self) -> None:
        """Free the accelerator's weights, gradients and optimizer state (kept on the host)."""
        ...

    def onload(self) -> None:
        """Undo `offload`, bit for bit."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...
