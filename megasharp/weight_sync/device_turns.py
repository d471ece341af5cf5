"""Who has the devices that learner and engines share: one order, the same on a CPU and on GPUs.

    start      engines started, then asleep; learner built
    HANDOVER   learner on, engines have room for weights: the push goes here
    SAMPLING   learner off, engines have weights and cache: rollouts and evaluations
    TRAINING   engines asleep, learner on: annotate, update, memory step
    HANDOVER   ...

So at no time do the learner's gradients and moments meet the engines' cache. A phase is entered when it is needed and
not before; engines never go from TRAINING to SAMPLING without a push, because sleep loses their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """Who has what."""

    TRAINING = "training"
    HANDOVER = "handover"
    SAMPLING = "sampling"


class Offloadable(Protocol):
    """A learner that can give its device's memory away and take it back."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class Sleeping(Protocol):
    """Engines that can do the same, in two parts."""

    def sleep(self) -> None: ...

    def rest(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...


class Apart:
    """Learner and engines have devices of their own, or memory for both: nothing to hand over."""

    def training(self) -> None:
        """Nothing to do."""

    def handover(self) -> None:
        """Nothing to do."""

    def sampling(self) -> None:
        """Nothing to do."""


class Colocated:
    """Turns between learners and engines on the same devices; begins in TRAINING, with the engines asleep."""

    def __init__(self, learners: Sequence[Offloadable], engines: Sleeping) -> None:
        self._learners = learners
        self._engines = engines
        self._phase = Phase.TRAINING

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    def training(self) -> None:
        """The learner computes; during a handover it is on already, and stays beside the engines' weights."""
        if self._phase is Phase.SAMPLING:
            self._engines.sleep()
            self._onload()
            self._phase = Phase.TRAINING

    def handover(self) -> None:
        """Weights are about to be pushed."""
        if self._phase is Phase.TRAINING:
            self._engines.wake_weights()
        elif self._phase is Phase.SAMPLING:
            self._engines.rest()
            self._onload()
        self._phase = Phase.HANDOVER

    def sampling(self) -> None:
        """The engines sample, with the weights that were pushed."""
        if self._phase is Phase.SAMPLING:
            return
        assert self._phase is Phase.HANDOVER, "engines that slept hold no weights"
        for learner in self._learners:
            learner.offload()
        self._engines.wake_cache()
        self._phase = Phase.SAMPLING

    def _onload(self) -> None:
        for learner in self._learners:
            learner.onload()
