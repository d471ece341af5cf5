"""Learner and engines on the same devices: whose turn it is, who is beside whom, and calls to each engine.

`Colocated` hands the devices over in one order, the same on a CPU and on GPUs:

    start      engines started, then asleep; learner built
    HANDOVER   learner on, engines have room for weights: the push goes here
    SAMPLING   learner off, engines have weights and cache: rollouts and evaluations
    TRAINING   engines asleep, learner on: annotate, update, memory step
    HANDOVER   ...

So at no time do the learner's gradients and moments meet the engines' cache. A phase is entered when it is needed and
not before; engines never go from TRAINING to SAMPLING without a push, because sleep loses their weights.

An engine that restarts takes memory for weights and cache at its start. So one of several restarts in SAMPLING, and the
learner comes back when it has started; where none is left, the learner leaves the devices for one (`lent`).

`Posts` calls several engines at the same time from a rank that goes on with its own part meanwhile. `SharePlan` says
which engines' ranks are on which learner rank's device, and `tell` sends each of them a text of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import Stamp
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, EngineSlow, Refused


class Phase(StrEnum):
    """A phase of a step; the module's docstring has their order."""

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

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Nothing to do."""
        yield

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

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The learner has left the devices inside, so that an engine can start; the phase stays what it is."""
        if self._phase is Phase.SAMPLING:
            yield
            return
        for learner in self._learners:
            learner.offload()
        try:
            yield
        finally:
            self._onload()

    def _onload(self) -> None:
        for learner in self._learners:
            learner.onload()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine did not do its part: it refused, it did not answer in time, or it cannot be reached any more."""

    kind: Literal["refused", "slow", "gone"]
    reason: str


Action = Callable[[int, EngineApi], Refused | None]


class Posts:
    """Calls under way, one to each engine, by the engines' numbers."""

    def __init__(self, engines: Sequence[tuple[int, EngineApi]], action: Action) -> None:
        self._pending = {number for number, _ in engines}
        self._answers: queue.SimpleQueue[tuple[int, Failure | None]] = queue.SimpleQueue()
        for number, api in engines:
            # Daemons: an engine that hangs must not keep this process from its end.
            threading.Thread(target=self._post, args=(number, api, action), daemon=True).start()

    def _post(self, number: int, api: EngineApi, action: Action) -> None:
        try:
            refused = action(number, api)
        except EngineSlow as error:
            self._answers.put((number, Failure("slow", str(error))))
        except EngineFailed as error:
            self._answers.put((number, Failure("gone", str(error))))
        except Exception as error:
            # A thread that ends without a word would be waited for.
            self._answers.put((number, Failure("gone", repr(error))))
        else:
            self._answers.put((number, None if refused is None else Failure("refused", f"refused: {refused.message}")))

    def failures(self, limit_s: float, grace_s: float) -> dict[int, Failure]:
        """Wait until all have answered, at most `limit_s`; after a failure only `grace_s` more.

        An engine that has not answered by then is slow: it may be waiting for the one that failed.
        """
        found: dict[int, Failure] = {}
        deadline = time.monotonic() + limit_s
        while self._pending:
            try:
                number, failure = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            self._pending.discard(number)
            if failure is not None:
                found[number] = failure
                deadline = min(deadline, time.monotonic() + grace_s)
        return found | {number: Failure("slow", f"no answer within {limit_s:g} s") for number in self._pending}


# One rank's argument of `EngineApi.load_lent`: (kind, text) pairs.
Texts = list[tuple[str, str]]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class SharePlan:
    """Instructions to share one network; `prefix` goes before every name.

    Rank `t` of engine number `n` is on the device of learner rank `beside[n][t]`, or, without a table, of
    `(n * tp + t) % world`: in order. The ranks of all of `engines`, counted through, are the seats.
    """

    stamp: Stamp
    prefix: str
    dtype: torch.dtype
    config: SyncConfig
    engines: tuple[tuple[int, EngineApi], ...]
    tp: int
    beside: tuple[tuple[int, ...], ...] = ()

    def seats(self, rank: int, world: int) -> list[int]:
        """The seats that are on this learner rank's device."""
        found = []
        for seat in range(self.tp * len(self.engines)):
            # By the engine's number: places of those that are alive change when one is lost.
            number, place = self.engines[seat // self.tp][0], seat % self.tp
            beside = self.beside[number][place] if self.beside else (number * self.tp + place) % world
            if beside == rank:
                found.append(seat)
        return found

    def engine_at(self, seat: int) -> EngineApi:
        """The engine whose rank has this seat."""
        return self.engines[seat // self.tp][1]


def tell(plan: SharePlan, texts: Mapping[int, Texts], numbers: Collection[int]) -> dict[int, Failure]:
    """Post every seat's texts to the engines of these numbers; returns, on every rank, those that failed.

    `texts` are those for the seats of this rank. When it returns, no engine reads that memory any more.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank 0 posts for all ranks: one call to an engine carries the texts for all of its ranks.
    gathered: list[Mapping[int, Texts]] | None = [{} for _ in range(world)] if rank == 0 else None
    if world == 1:
        gathered = [texts]
    else:
        dist.gather_object(texts, gathered)
    failures: dict[int, Failure] = {}
    if gathered is not None:
        by_seat = {seat: facts for each in gathered for seat, facts in each.items()}
        limit_s = plan.config.limit_s
        first = {number: place * plan.tp for place, (number, _) in enumerate(plan.engines)}

        def load(number: int, api: EngineApi) -> Refused | None:
            return api.load_lent([by_seat[first[number] + each] for each in range(plan.tp)], limit_s)

        asked = [engine for engine in plan.engines if engine[0] in numbers]
        failures = Posts(asked, load).failures(limit_s, limit_s)
    return from_first(failures)


def from_first(value: _Value) -> _Value:
    """Return rank 0's value on every rank; all wait for it."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_all(value: bool) -> bool:
    """Return True where `value` is true on every rank; all wait for it."""
    found: list[bool] = [value] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return all(found)
