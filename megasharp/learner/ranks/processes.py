"""Ranks as child processes of the command, on this machine.

The driver sends one call to every rank and waits for all answers. A rank that raises sends its error; the death of a
rank is noticed at once by its process, not by a collective's timeout. Whichever happens, all ranks are ended. `serve`
is the rank's own side: it builds the learners, then answers calls until the pipe closes.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from megasharp.common import fork_server, signals
from megasharp.common.errors import RankDied, UserError, one_line
from megasharp.common.files import Scratch, write_below
from megasharp.common.fork_server import child_environment
from megasharp.common.group_environment import keep_to
from megasharp.common.parent_death import end_with_parent
from megasharp.common.stack_dumps import STOPPED, state_of, write_stacks_on_signal
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner
from megasharp.learner.parallel import device_of_rank, meet
from megasharp.learner.ranks.messages import Message, Shared, receive, send

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Facts of one rank: number, device, file of the process group's store, log, CPU threads, environment variables."""

    rank: int
    device: torch.device
    store: str
    log: str
    threads: int
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call with this rank's part of a learner; None in its place ends the rank."""

    learner: str
    function: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def carry_out(self, rank: Rank) -> object:
        """Return what the function returns on this rank."""
        return self.function(rank.learners[self.learner], *self.args, **self.kwargs)


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
    """A call raised; `user_error` marks a mistake that the user can fix."""

    text: str
    user_error: bool


def serve(worker: WorkerSettings, settings: Mapping[str, LearnerSettings], connection: Connection) -> None:
    """Run a rank's process, from start to end."""
    end_with_parent(os.getppid())
    driver = multiprocessing.parent_process()
    # The parent may be the process that this one was forked from, which ends with the driver.
    if driver is not None and not driver.is_alive():
        os._exit(1)
    # The process that this one was forked from may be older than the run's folder.
    write_below(Path(worker.log).parent)
    redirect_output(worker.log)
    write_stacks_on_signal(worker.rank, Path(worker.log))
    torch.set_num_threads(worker.threads)
    # One that was forked has the environment of the process that it was forked from.
    os.environ.update(worker.variables)
    keep_to("lo")
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


def _answer_calls(rank: Rank, connection: Connection) -> None:
    while (request := _request(connection)) is not None:
        result = request.carry_out(rank)
        # Not until the next call, which may be minutes away: its tensors may lie in memory that ranks map.
        del request
        if inspect.isgenerator(result):
            for name, tensor in cast("Iterator[tuple[str, Tensor]]", result):
                _send(connection, Item(name, tensor.cpu()))
            result = None
        _send(connection, Returned(result))
    rank.close()


def _request(connection: Connection) -> Call | None:
    """Return the next call; None where the driver wants no more, or is gone."""
    try:
        return cast("Call | None", receive(connection))
    except EOFError:
        return None


def _send(connection: Connection, message: Returned | Item | Failed) -> None:
    send(connection, Message.of(message))


def redirect_output(log: str) -> None:
    """Write both streams of this process to its log file, also what libraries in C write."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


_SHUTDOWN_S = 20.0
_NEWS_S = 0.2


class ProcessRanks:
    """Satisfies `Ranks`. Children end with this object or with this process, whichever ends first.

    `threads` is the number of CPU threads of each rank, `variables` what its environment gets from its start on.
    """

    def __init__(
        self,
        settings: Mapping[str, LearnerSettings],
        device: torch.device,
        log_folder: Path,
        threads: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._layout = settings[POLICY].layout
        self._log_folder = log_folder
        self._variables = dict(variables)
        self._meeting = Scratch("megasharp-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        log_folder.mkdir(parents=True, exist_ok=True)
        # At its end the interpreter would wait for the ranks, which wait for the next call.
        atexit.register(self._kill)
        try:
            for rank in range(settings[POLICY].layout.world):
                self._start(rank, settings, device, threads)
            self._collect("start")
        except BaseException:
            self._kill()
            raise

    def _start(self, rank: int, settings: Mapping[str, LearnerSettings], device: torch.device, threads: int) -> None:
        context = _context(device)
        ours, theirs = context.Pipe()
        worker = WorkerSettings(
            rank=rank,
            device=device_of_rank(device, rank),
            store=str(self._meeting.path / "store"),
            log=str(self._log_folder / f"rank_{rank}.log"),
            threads=threads,
            variables=self._variables,
        )
        # Ranks write checkpoints through processes of their own, which daemons may not have.
        process = context.Process(target=serve, args=(worker, settings, theirs), name=f"megasharp rank {rank}")
        # A process that runs and is not known here would not be ended.
        with signals.held():
            with child_environment(self._variables), signals.kept_from_children():
                process.start()
            self._connections.append(ours)
            self._processes.append(process)
        theirs.close()

    def call(
        self, learner: str, function: Callable[Concatenate[RankLearner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return every rank's result, in rank order."""
        self._send([Call(learner, function, args, kwargs)], function.__name__)
        return self._collect(function.__name__)

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
        self._send([Call(learner, function, (share, *args), kwargs) for share in shares], function.__name__)
        return self._collect(function.__name__)

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the items of all ranks as they arrive, on the CPU."""
        self._send([Call(learner, function)], function.__name__)
        pending = set(range(len(self._connections)))
        while pending:
            for rank, message in self._receive(pending, function.__name__):
                if isinstance(message, Item):
                    yield message.name, message.tensor
                else:
                    pending.discard(rank)

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not. Nothing to do when they have ended already."""
        if not self._connections:
            return
        with contextlib.suppress(RankDied):
            self._send([None], "close")
        deadline = time.monotonic() + _SHUTDOWN_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _send(self, calls: Sequence[Call | None], method: str) -> None:
        """Send one call to all ranks, or each data-parallel place its own, one after the other."""
        for place, call in enumerate(calls):
            ranks = [
                rank
                for rank in range(len(self._connections))
                if len(calls) == 1 or self._layout.data_rank(rank) == place
            ]
            with contextlib.closing(self._shared(call)) as shared:
                for rank in ranks:
                    try:
                        shared.send(self._connections[rank], self._processes[rank].pid or 0)
                    except OSError as error:
                        raise self._died(rank, method) from error

    def _shared(self, call: Call | None) -> Shared:
        try:
            return Shared(Message.of(call))
        except BaseException:
            # Some ranks may have their share, and would wait for those that have none.
            self._kill()
            raise

    def _collect(self, method: str) -> list[Any]:
        results: dict[int, object] = {}
        while len(results) < len(self._connections):
            pending = set(range(len(self._connections))) - results.keys()
            for rank, message in self._receive(pending, method):
                assert isinstance(message, Returned)
                results[rank] = message.value
        return [results[rank] for rank in range(len(self._connections))]

    def _receive(self, pending: set[int], method: str) -> list[tuple[int, Returned | Item]]:
        """Return the messages that are ready. Raises when a pending rank failed or is gone."""
        ready = wait([self._connections[rank] for rank in pending])
        arrived = [(rank, self._message(rank)) for rank in sorted(pending) if self._connections[rank] in ready]
        messages = [(rank, message) for rank, message in arrived if isinstance(message, Returned | Item)]
        if len(messages) < len(arrived):
            raise self._failure(arrived, method)
        return messages

    def _message(self, rank: int) -> Returned | Item | Failed | None:
        """Return the rank's next message; None when it is gone."""
        try:
            message: Returned | Item | Failed = receive(self._connections[rank])
        except (EOFError, OSError):
            return None
        return message

    def _failure(self, arrived: Sequence[tuple[int, object]], method: str) -> Exception:
        """Return the first cause: a user's mistake or a death, before the errors that it gives its peers."""
        failed = [(rank, message) for rank, message in arrived if isinstance(message, Failed)]
        mistakes = [message.text for _, message in failed if message.user_error]
        if mistakes:
            self._kill()
            return UserError(mistakes[0])
        dead = [rank for rank, message in arrived if message is None]
        if not dead:
            # An error may come from the death of a peer, which the kernel reports a moment later.
            for process in self._processes:
                process.join(_NEWS_S)
            dead = [rank for rank, process in enumerate(self._processes) if (process.exitcode or 0) < 0]
        if dead:
            return self._died(dead[0], method)
        rank, message = failed[0]
        failure = f"rank {rank} failed in {method}: {message.text}"
        # Peers of a rank that the kernel keeps from running give up in the end: the cause is named beside their error.
        states = {rank: state_of(process.pid or 0) for rank, process in enumerate(self._processes)}
        stopped = ", ".join(f"rank {rank} {STOPPED[state]}" for rank, state in states.items() if state in STOPPED)
        self._kill()
        return RankDied(f"{stopped}, and {failure}" if stopped else failure)

    def _died(self, rank: int, method: str) -> RankDied:
        process = self._processes[rank]
        process.join(_SHUTDOWN_S)
        code = process.exitcode
        self._kill()
        log = self._log_folder / f"rank_{rank}.log"
        return RankDied(f"rank {rank} ended with exit code {code} in {method}; its log is {log}")

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._meeting.close()
        atexit.unregister(self._kill)


def _context(device: torch.device) -> SpawnContext | ForkServerContext:
    """Return a context that forks ranks on CPUs from one process with all imports done; CUDA allows no fork."""
    if device.type != "cpu":
        return multiprocessing.get_context("spawn")
    # Checkpoint code is imported late elsewhere; ranks that wrote one would each import it again.
    return fork_server.context([serve.__module__, "megasharp.learner.async_checkpoint"])
