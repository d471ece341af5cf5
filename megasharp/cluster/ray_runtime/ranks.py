"""The learner's ranks as Ray actors, each in its slot.

The driver sends one call to every rank and waits for all answers. A rank that raises sends its error; Ray notices the
death of a rank within seconds, not after a collective's timeout. Whichever happens, all ranks are ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from megasharp.cluster.ray_runtime.process_environment import usable
from megasharp.cluster.ray_runtime.rank_actor import Joiner, Parcel, RankActor, RankFacts
from megasharp.cluster.ray_runtime.slots import Slots, end_actors
from megasharp.common.errors import RankDied, UserError, one_line
from megasharp.common.group_environment import in_order
from megasharp.learner.learner import POLICY, LearnerSettings, RankLearner
from megasharp.learner.parallel import device_of_rank
from megasharp.learner.ranks.processes import Failed, Returned

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_SHUTDOWN_S = 20.0
_POLL_S = 1.0
# A death may become known only after the errors that it caused in its peers, by so many seconds.
_NEWS_S = 3.0
# Parts that a rank may have on their way: with `rank_actor.PART_BYTES` this bounds a stream's memory.
_PARTS_AHEAD = 2

_Answer = Returned | Failed | None


class RayRanks:
    """Satisfies `Ranks`. The actors end with this object, with their slots, and with the driver.

    `device` is "cpu" or "cuda"; `threads` is the number of CPU threads of each rank, `variables` what its environment
    gets. Logs are `log_folder`/rank_i.log on each rank's own node.
    """

    def __init__(
        self,
        settings: Mapping[str, LearnerSettings],
        device: torch.device,
        slots: Slots,
        log_folder: Path,
        threads: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
        start_limit_s: float = 600.0,
    ) -> None:
        self._layout = layout = settings[POLICY].layout
        world = layout.world
        assert slots.layout.world == world, "the layout was made for another number of ranks"
        self._log_folder = log_folder.absolute()
        seats = [slots.layout.of_rank(rank) for rank in range(world)]
        # Ray shows each actor its own GPU alone.
        own = device_of_rank(device, 0)
        facts = [
            RankFacts(rank, slots.seats[seat].node, own, self._log(rank), threads) for rank, seat in enumerate(seats)
        ]
        capabilities = [slots.seats[seat].capability for seat in seats]
        ordered = [in_order(layout.splits_tensors, capability, os.environ) for capability in capabilities]
        self._actors = [
            slots.actor(RankActor, seat, fact, variables={**variables, **own})
            for seat, fact, own in zip(seats, facts, ordered, strict=True)
        ]
        deadline = time.monotonic() + start_limit_s
        try:
            self._collect({rank: actor.prepare.remote() for rank, actor in enumerate(self._actors)}, "start", deadline)
            # Rank 0 opens the store where all meet, on a free port of its node.
            (port,) = self._collect({0: self._actors[0].host.remote(world)}, "start", deadline)
            address, shared = facts[0].address, ray.put(dict(settings))
            starting = {rank: actor.start.remote(address, port, shared) for rank, actor in enumerate(self._actors)}
            self._collect(starting, "start", deadline)
        except BaseException:
            self._kill()
            raise

    def process_ids(self) -> list[int]:
        """Return the ranks' process ids, each on its own node."""
        return list(ray.get([actor.process_id.remote() for actor in self._actors]))

    def call(
        self, learner: str, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return every rank's result, in rank order."""
        return self._call(learner, function, [(args, kwargs)])

    def call_shared(
        self,
        learner: str,
        function: Callable[Concatenate[RankLearner, S, P], T],
        shares: Sequence[S],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Return every rank's result for its share, in rank order."""
        assert len(shares) == self._layout.dp, "one share for each data-parallel place"
        return self._call(learner, function, [((share, *args), kwargs) for share in shares])

    def _call(self, learner: str, function: Callable[..., Any], arguments: Sequence[object]) -> list[Any]:
        """Call with these arguments on all ranks, or on each data-parallel place with its own."""
        # Once into the object store, not once per rank. They leave it with the last rank that reads them.
        stored = [ray.put(Parcel.of(one)) for one in arguments]
        pending = {
            rank: actor.call.remote(learner, function, stored[self._layout.data_rank(rank) if len(stored) > 1 else 0])
            for rank, actor in enumerate(self._actors)
        }
        return [parcel.copied() for parcel in self._collect(pending, function.__name__)]

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the items of all ranks as they arrive, a bounded number of bytes ahead of the reader."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": _PARTS_AHEAD}
        streams = {
            rank: actor.stream.options(**options).remote(learner, function) for rank, actor in enumerate(self._actors)
        }
        joiners = {rank: Joiner() for rank in streams}
        while streams:
            ready, _ = ray.wait(list(streams.values()), num_returns=1, timeout=_POLL_S, fetch_local=False)
            for rank in [rank for rank, stream in streams.items() if stream in ready]:
                try:
                    answer = _get(next(streams[rank]))
                except StopIteration:
                    del streams[rank]
                    continue
                if answer is None or isinstance(answer, Failed):
                    raise self._failure({rank: answer}, {}, function.__name__)
                yield from joiners[rank].add(answer)

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not. Nothing to do when they have ended already."""
        if not self._actors or not usable():
            return
        with suppress(RayError):
            ray.wait(
                [actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_SHUTDOWN_S
            )
        self._kill()

    def _collect(self, pending: Mapping[int, Any], method: str, deadline: float | None = None) -> list[Any]:
        """Return the values of all pending answers, in rank order. Raises when one fails, dies or is too late."""
        left, values = dict(pending), dict[int, object]()
        while left:
            arrived = _arrived(left, _POLL_S)
            for rank in arrived:
                del left[rank]
            for rank, answer in arrived.items():
                if not isinstance(answer, Returned):
                    raise self._failure({r: a for r, a in arrived.items() if not isinstance(a, Returned)}, left, method)
                values[rank] = answer.value
            if left and deadline is not None and time.monotonic() > deadline:
                self._kill()
                rank = min(left)
                raise RankDied(f"rank {rank} did not finish {method} in time; its log is {self._log(rank)}")
        return [values[rank] for rank in sorted(pending)]

    def _failure(self, bad: Mapping[int, _Answer], left: Mapping[int, Any], method: str) -> Exception:
        """Return the first cause: a user's mistake or a death, before the errors that it gives its peers."""
        failed = {rank: answer for rank, answer in bad.items() if isinstance(answer, Failed)}
        mistakes = [answer.text for answer in failed.values() if answer.user_error]
        if mistakes:
            self._kill()
            return UserError(mistakes[0])
        dead = [rank for rank, answer in bad.items() if answer is None] or self._dead(left, set(failed))
        self._kill()
        if dead:
            return RankDied(f"rank {dead[0]} ended in {method}; its log is {self._log(dead[0])}")
        rank, first = next(iter(failed.items()))
        return RankDied(f"rank {rank} failed in {method}: {first.text}")

    def _dead(self, left: Mapping[int, Any], failed: set[int]) -> list[int]:
        """Return the ranks whose process is gone, once Ray has had a moment to report it."""
        waiting, deadline = dict(left), time.monotonic() + _NEWS_S
        for rank, actor in enumerate(self._actors):
            if rank not in failed and rank not in waiting:
                waiting[rank] = actor.process_id.remote()
        while waiting and time.monotonic() < deadline:
            arrived = _arrived(waiting, _POLL_S / 5)
            dead = [rank for rank, answer in arrived.items() if answer is None]
            if dead:
                return dead
            waiting = {rank: ref for rank, ref in waiting.items() if rank not in arrived}
        return []

    def _log(self, rank: int) -> Path:
        return self._log_folder / f"rank_{rank}.log"

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        end_actors(actors, _SHUTDOWN_S)


def _arrived(pending: Mapping[int, Any], limit: float) -> dict[int, Any]:
    """Return answers that arrive within `limit` seconds, by rank; None from a rank that is gone."""
    ready, _ = ray.wait(list(pending.values()), num_returns=1, timeout=limit)
    if ready:
        # Those that came with it: the cause is judged among all of them.
        ready, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=0)
    return {rank: _get(ref) for rank, ref in pending.items() if ref in ready}


def _get(ref: Any) -> Any:
    """Return a rank's answer; None when the rank is gone."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        # The actor itself could not answer: its arguments could not be read, or its result not be sent.
        return Failed(one_line(error), False)
    except RayError:
        return None
