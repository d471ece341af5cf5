"""The two ends of a weight sync: the learner that yields weights, and the engine that takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

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
