"""The in-process sync: versions, and the memory network's weights behind the policy's under their prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megasharp.weight_sync.endpoints import InProcessSync, NamedTensors


class Source:
    """Yields `names` in order with the tensor [number, 0], and notes each in `log`."""

    def __init__(self, number: float, names: tuple[str, ...], log: list[float]) -> None:
        self._number, self._names, self._log = number, names, log

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            self._log.append(self._number)
            yield name, torch.tensor([self._number, 0.0])


class Sink:
    """Keeps what it was given; refuses everything while `broken`."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, list[tuple[str, float]]]] = []
        self.broken = False

    def load_weights(self, version: int, tensors: NamedTensors) -> None:
        if self.broken:
            raise ConnectionError("lost")
        self.loads.append((version, [(name, float(tensor[0])) for name, tensor in tensors]))


def test_a_push_carries_the_policy_and_then_the_memory() -> None:
    sink, log = Sink(), []
    policy, memory = Source(1.0, ("a.weight", "b.weight"), log), Source(2.0, ("a.weight", "c.weight"), log)
    sync = InProcessSync(sink)
    assert sync.push(policy, memory) == sync.version == 0
    assert sync.push(policy) == sync.version == 1
    plain = [("a.weight", 1.0), ("b.weight", 1.0)]
    assert sink.loads == [(0, [*plain, ("memory.a.weight", 2.0), ("memory.c.weight", 2.0)]), (1, plain)]
    assert log == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]


def test_a_push_that_fails_keeps_the_version() -> None:
    sink = Sink()
    sync = InProcessSync(sink, version=6)
    sink.broken = True
    with pytest.raises(ConnectionError):
        sync.push(Source(1.0, ("a",), []), Source(2.0, ("a",), []))
    assert sync.version == 6
    sink.broken = False
    assert sync.push(Source(1.0, ("a",), [])) == 7
