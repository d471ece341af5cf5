"""What runs in a rank's own process: build the learners, then answer calls until the pipe closes."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from megasharp.errors import UserError, one_line
from megasharp.mcore.learner import LearnerSettings
from megasharp.mcore.parallel import meet
from megasharp.mcore.rank import POLICY, Rank
from megasharp.orphans import end_with_parent
from megasharp.stacks import write_stacks_on_signal


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A rank's own facts: its number, device, meeting file, log and CPU threads."""

    rank: int
    device: torch.device
    store: str
    log: str
    threads: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of this rank's part of a learner, or a function on that part; None in its place ends the rank."""

    learner: str
    what: str | Callable[..., Any]
    args: tuple[object, ...]

    def carry_out(self, rank: Rank) -> object:
        """What the call returns on this rank."""
        learner = rank.learners[self.learner]
        if isinstance(self.what, str):
            return cast(object, getattr(learner, self.what)(*self.args))
        return cast(object, self.what(learner, *self.args))


@dataclass(frozen=True, slots=True)
class Returned:
    """A call ended with this value (None ends a stream)."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One named tensor of a stream."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Failed:
    """A call raised; `user_error` marks a mistake the user can mend."""

    text: str
    user_error: bool


def serve(worker: WorkerSettings, settings: Mapping[str, LearnerSettings], connection: Connection) -> None:
    """A rank's process, from start to end."""
    _end_with_driver()
    redirect_output(worker.log)
    write_stacks_on_signal(worker.rank, Path(worker.log))
    torch.set_num_threads(worker.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        world = settings[POLICY].layout.world
        store = FileStore(worker.store, world)
        meet(store, worker.rank, world, worker.device)
        rank = Rank(settings, worker.device)
        _send(connection, Returned(None))
        _answer_calls(rank, connection)
    except Exception as error:
        traceback.print_exc()
        _send(connection, Failed(one_line(error), isinstance(error, UserError)))
        sys.exit(1)


def _end_with_driver() -> None:
    """Between the two may stand the process that this one was forked from, which ends with the driver."""
    end_with_parent(os.getppid())
    driver = multiprocessing.parent_process()
    if driver is not None and not driver.is_alive():
        os._exit(1)


def _answer_calls(rank: Rank, connection: Connection) -> None:
    while (request := _request(connection)) is not None:
        result = request.carry_out(rank)
        if inspect.isgenerator(result):
            for name, tensor in cast("Iterator[tuple[str, Tensor]]", result):
                _send(connection, Item(name, tensor.cpu()))
            result = None
        _send(connection, Returned(result))
    rank.close()


def _request(connection: Connection) -> Call | None:
    """The next call; None where the driver wants no more, or is gone."""
    try:
        return cast("Call | None", pickle.loads(connection.recv_bytes()))
    except EOFError:
        return None


def _send(connection: Connection, message: Returned | Item | Failed) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def redirect_output(log: str) -> None:
    """Both streams of this process into its log file, libraries' included."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
