"""The two ends of a weight sync: the learner that yields weights, and the engine that takes them.

`InProcessSync` joins them inside one process: the engine copies what the learner yields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from torch import Tensor

from megasharp.common.records import MEMORY_PREFIX

NamedTensors = Iterable[tuple[str, Tensor]]


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


def joined(source: WeightSource, memory: WeightSource | None) -> Iterator[tuple[str, Tensor]]:
    """Chain all weights of a push: the policy's under their names, then the memory network's under `MEMORY_PREFIX`.

    The memory's export starts with the first tensor asked for: not before the policy's has ended.
    """

    def of_memory() -> Iterator[tuple[str, Tensor]]:
        if memory is not None:
            yield from prefixed(memory.export_weights(), MEMORY_PREFIX)

    return chain(source.export_weights(), of_memory())


def prefixed(tensors: NamedTensors, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors, with `prefix` before every name."""
    for name, tensor in tensors:
        yield prefix + name, tensor


class PushedVersions:
    """Versions of policy and memory network last pushed, each with a count of its own; -1 before the first."""

    def __init__(self, version: int = -1, memory_version: int = -1) -> None:
        self._version = version
        self._memory_version = memory_version

    @property
    def version(self) -> int:
        """The policy's version last pushed."""
        return self._version

    @property
    def memory_version(self) -> int:
        """The memory network's version last pushed."""
        return self._memory_version


class OwnWeights(Protocol):
    """Engines that live where the learners do."""

    def load_own(self, version: int) -> None:
        """Load the learners' present weights as `version` of the policy, those of a memory network too."""
        ...


class InPlaceSync(PushedVersions):
    """Has engines that live beside the learners' own weights load them under a new version."""

    def __init__(self, engines: OwnWeights, version: int = -1, memory_version: int = -1) -> None:
        super().__init__(version, memory_version)
        self._engines = engines

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int:
        """Load all weights, and the memory network's if given; returns the new version, one above the last."""
        self._engines.load_own(self._version + 1)
        self._version += 1
        self._memory_version += memory is not None
        return self._version


class InProcessSync(PushedVersions):
    """Pushes every weight of the source to the sink under a new version."""

    def __init__(self, sink: WeightSink, version: int = -1, memory_version: int = -1) -> None:
        super().__init__(version, memory_version)
        self._sink = sink

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int:
        """Push all weights, and those of the memory network if given; returns the new version, one above the last."""
        self._sink.load_weights(self._version + 1, joined(source, memory))
        self._version += 1
        self._memory_version += memory is not None
        return self._version
