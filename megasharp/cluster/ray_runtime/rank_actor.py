"""A rank's actor on a Ray cluster: the same rank as in a child process, which finds its peers over TCP.

Calls and results go through Ray's object store as a `Parcel`, streams of tensors in parts of bounded size: `cut` makes
them, `Joiner` joins them.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from megasharp.cluster.ray_runtime.process_environment import interface_of
from megasharp.common.errors import UserError, one_line
from megasharp.common.files import write_below
from megasharp.common.group_environment import adapters, keep_to
from megasharp.common.parent_death import end_with_parent
from megasharp.common.stack_dumps import write_stacks_on_signal
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner
from megasharp.learner.parallel import COLLECTIVE_TIMEOUT, meet
from megasharp.learner.ranks.messages import Message
from megasharp.learner.ranks.processes import Failed, Returned, redirect_output

P = ParamSpec("P")
PART_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some bytes of a tensor: uint8, contiguous, in NumPy, which Ray sends without a copy.

    `last` marks the tensor's end.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    last: bool


def cut(tensors: Iterable[tuple[str, Tensor]], limit: int = PART_BYTES) -> Iterator[list[Part]]:
    """Yield lists of parts of at most `limit` bytes in all, in order; small tensors travel together.

    The bytes are copies: a tensor may change once the next list is asked for.
    """
    waiting: list[Part] = []
    room = limit
    for name, tensor in tensors:
        data = _bytes_of(tensor)
        start = 0
        while True:
            end = min(data.size, start + room)
            waiting.append(Part(name, tensor.dtype, tuple(tensor.shape), data[start:end].copy(), end == data.size))
            room -= end - start
            if room == 0:
                yield waiting
                waiting, room = [], limit
            start = end
            if end == data.size:
                break
    if waiting:
        yield waiting


class Joiner:
    """Puts one stream's parts together again."""

    def __init__(self) -> None:
        self._data: list[NDArray[np.uint8]] = []

    def add(self, parts: Iterable[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that is whole now, on the CPU, in memory of its own."""
        for part in parts:
            self._data.append(part.data)
            if part.last:
                whole = torch.empty(part.shape, dtype=part.dtype)
                np.concatenate(self._data, out=_bytes_of(whole))
                self._data = []
                yield part.name, whole


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a contiguous CPU tensor's own memory as uint8; of any other tensor, a copy's."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A pickled value with its tensors' bytes beside it, in NumPy, which Ray's own pickle leaves out too.

    Ray copies them into its store once, brings them to a node once, and all ranks there read the same memory.
    """

    pickled: bytes
    buffers: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(cls, value: object) -> Parcel:
        """Pickle a value without a copy of its tensors."""
        message = Message.of(value)
        return cls(message.pickled, tuple(np.frombuffer(buffer, np.uint8) for buffer in message.buffers))

    def value(self) -> Any:
        """Return the value; its tensors are Ray's memory, which nobody writes into."""
        return Message(self.pickled, [buffer.data for buffer in self.buffers]).value()

    def copied(self) -> Any:
        """Return the value in memory of this process, so that Ray's is free again."""
        return Parcel(self.pickled, tuple(buffer.copy() for buffer in self.buffers)).value()


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts of one rank: number, its node's address in the cluster, device, log and CPU threads."""

    rank: int
    address: str
    device: torch.device
    log: Path
    threads: int


def _answered(method: Callable[P, object]) -> Callable[P, Returned | Failed]:
    """Wrap a method so that it returns `Returned` or `Failed` and never raises."""

    @functools.wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> Returned | Failed:
        try:
            return Returned(method(*args, **kwargs))
        except Exception as error:
            return _failed(error)

    return answer


def _failed(error: Exception) -> Failed:
    traceback.print_exc()
    sys.stderr.flush()
    return Failed(one_line(error), isinstance(error, UserError))


class RankActor:
    """One rank. Every call answers with `Returned` or `Failed`; an exception would hide the cause behind Ray's."""

    def __init__(self, facts: RankFacts) -> None:
        # As an engine's actor does.
        end_with_parent(os.getppid())
        self._facts = facts
        self._store: Store | None = None
        self._rank: Rank | None = None

    def process_id(self) -> int:
        """Return this process's id on its node."""
        return os.getpid()

    @_answered
    def prepare(self) -> None:
        """Write to the rank's own log, and keep collectives on the cluster's interface and this node's adapters."""
        import ray

        facts = self._facts
        write_below(facts.log.parent)
        redirect_output(str(facts.log))
        write_stacks_on_signal(facts.rank, facts.log, str(ray.get_runtime_context().get_node_id()))
        torch.set_num_threads(facts.threads)
        keep_to(interface_of(facts.address), adapters())

    @_answered
    def host(self, world: int) -> int:
        """Open the store where `world` ranks meet, on this node's address; returns its port."""
        listening = socket.create_server((self._facts.address, 0))
        port: int = listening.getsockname()[1]
        # The store gets a socket, because by itself it would listen on every interface.
        self._store = TCPStore(
            self._facts.address,
            port,
            world,
            is_master=True,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return port

    @_answered
    def start(self, address: str, port: int, settings: Mapping[str, LearnerSettings]) -> None:
        """Meet the other ranks and build this rank's learners."""
        world, device = settings[POLICY].layout.world, self._facts.device
        if self._store is None:
            self._store = TCPStore(
                address, port, world, is_master=False, timeout=COLLECTIVE_TIMEOUT, wait_for_workers=False
            )
        meet(self._store, self._facts.rank, world, device)
        self._rank = Rank(settings, device)

    @_answered
    def call(self, learner: str, function: Callable[..., object], arguments: Parcel) -> Parcel:
        """Call `function` with the named learner's part, and positional and named `arguments`."""
        args, kwargs = arguments.value()
        return Parcel.of(function(self._part(learner), *args, **kwargs))

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[list[Part] | Failed]:
        """Yield a generator function's tensors in parts of bounded size; the last item is `Failed` when it raised."""
        try:
            yield from cut(function(self._part(learner)))
        except Exception as error:
            yield _failed(error)

    def close(self) -> None:
        """Forget the parallel groups; the process is ended by whoever started it."""
        if self._rank is not None:
            self._rank.close()
            dist.destroy_process_group()
            self._rank = None

    def _part(self, learner: str) -> RankLearner:
        assert self._rank is not None, "the rank has not started"
        return self._rank.learners[learner]
