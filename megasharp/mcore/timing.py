"""Seconds of an update's parts on this rank: forward and backward passes, gradients over ranks, the optimizer.

Megatron's schedules start and stop timers that a model's configuration brings. On a GPU the parts are marked by events
in its stream, so that nothing waits for it until the figures are taken.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

# Megatron's names of what is told here; it has more of them.
_STAGES = {"forward-compute": "forward", "backward-compute": "backward", "all-grads-sync": "gradient_sync"}


class _Mark(Protocol):
    """A moment of this rank's device."""

    def until(self, later: _Mark) -> float:
        """Seconds from here to `later`; both have come."""
        ...


class _Now:
    """A moment of the CPU, where calls return when their work is done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def until(self, later: _Mark) -> float:
        """Seconds between."""
        assert isinstance(later, _Now)
        return later.at - self.at


class _InStream:
    """A moment of the GPU's stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, later: _Mark) -> float:
        """Seconds between."""
        assert isinstance(later, _InStream)
        return float(self._event.elapsed_time(later._event)) / 1e3


class StageTimers:
    """What Megatron calls `timers`, for one learner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: defaultdict[str, list[tuple[_Mark, _Mark]]] = defaultdict(list)
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """Megatron's timer of that name."""
        return self._timers.setdefault(name, _Timer(self, _STAGES.get(name)))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The body's seconds count for the stage `name`."""
        began = self.mark()
        yield
        self.add(name, began)

    def mark(self) -> _Mark:
        """Now, on this rank's device."""
        return _InStream() if self._device.type == "cuda" else _Now()

    def add(self, name: str, began: _Mark) -> None:
        """The stage `name` ran from `began` until now."""
        self._marks[name].append((began, self.mark()))

    def reset(self) -> None:
        """Forget what was measured: passes before an update are none of its parts."""
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last time; on a GPU it waits until all of it is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = {name: sum(began.until(ended) for began, ended in marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return found


class _Timer:
    """One start and stop after the other; of a stage that is not told of, nothing is kept."""

    def __init__(self, timers: StageTimers, stage: str | None) -> None:
        self._timers = timers
        self._stage = stage
        self._began: _Mark | None = None

    def start(self, barrier: bool = False) -> None:
        """Ranks do not wait for each other, whatever `barrier` says: that would be another step than is trained."""
        if self._stage is not None:
            self._began = self._timers.mark()

    def stop(self, barrier: bool = False) -> None:
        """The end of what `start` began."""
        if self._stage is not None:
            assert self._began is not None, f"{self._stage} was not started"
            self._timers.add(self._stage, self._began)
