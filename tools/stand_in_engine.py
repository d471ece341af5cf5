"""An engine's part in a push of weights, in a process of its own and without SGLang, for benchmarks and GPU tests.

It holds a model's weights under their Hugging Face names, reads lent memory with the engines' own code
(`rollout/sglang/shared_weights.py`), and takes part in broadcasts as SGLang does: one flat tensor a bucket.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from megasharp.rollout.sglang.bucket import Entry, Header, checksum, parse_header, unflattened
from megasharp.rollout.sglang.client.api import EngineApi, GroupSeat, Refused
from megasharp.rollout.sglang.shared_weights import Borrower, Goal, parse_loan, parse_memory

Shapes = Mapping[str, tuple[int, ...]]


class Weights:
    """The other process: weights of zeros on `device`, and what happens to them."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._held = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self._device = device
        self._borrower = Borrower()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._announced: tuple[Entry, ...] = ()

    def load_lent(self, ranks: Sequence[Sequence[tuple[str, str]]]) -> None:
        """As `rollout/sglang/engine/receive.py` loads them."""
        [((kind, text), *rest)] = ranks
        if kind == "loan":
            loan = parse_loan(text)
            self._borrower.prepare(loan, self._goals, "here")
            self._borrower.copy(loan)
        else:
            header = parse_header(text)
            (flat,) = self._borrower.storages(parse_memory(rest[0][1]), header.stamp.push)
            self._load(unflattened(header.tensors, flat))
        self._wait()

    def announce(self, header: str) -> None:
        """What the next broadcast brings, or the end of the push."""
        self._announced = parse_header(header).tensors
        if not self._announced:
            self._borrower.end_push()

    def join_group(self, seat: GroupSeat) -> None:
        """Meet the learner's rank."""
        limit = timedelta(seconds=60)
        store = TCPStore(seat.host, seat.port, seat.world, is_master=False, timeout=limit)
        group, _ = c10d._new_process_group_helper(
            seat.world,
            seat.offset,
            [],
            c10d.Backend(seat.backend),
            PrefixStore(seat.name, store),
            group_name=c10d.GroupName(seat.name),
            timeout=limit,
        )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(seat.world)}
        self._groups[seat.name] = group

    def receive_broadcast(self, group: str) -> None:
        """One bucket, its tensors' bytes one after another."""
        held = [self._held[entry.name] for entry in self._announced]
        flat = torch.empty(sum(entry.nbytes for entry in self._announced), dtype=torch.uint8, device=self._device)
        dist.broadcast(flat, src=0, group=self._groups[group])
        parts = flat.split_with_sizes([entry.nbytes for entry in self._announced])
        torch._foreach_copy_(held, [part.view(to.dtype).view(to.shape) for part, to in zip(parts, held, strict=True)])
        self._wait()

    def checksums(self) -> dict[str, str]:
        """Of what it holds."""
        return {name: checksum(tensor) for name, tensor in self._held.items()}

    def _goals(self) -> dict[str, Goal]:
        return {name: Goal(tensor, 0, 0, tuple(tensor.shape)) for name, tensor in self._held.items()}

    def _load(self, tensors: Any) -> None:
        named = dict(tensors)
        torch._foreach_copy_([self._held[name] for name in named], list(named.values()))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def serve(connection: Connection, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
    """Do what comes, until nothing more does."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    weights = Weights(shapes, dtype, device)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(weights, name)(*arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


class StandIn:
    """This process's side, called as `EngineApi` is."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, dict(shapes), dtype, device), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._process.pid

    @property
    def api(self) -> EngineApi:
        """Itself, as a sender wants it."""
        return cast(EngineApi, self)

    def load_lent(self, ranks: Sequence[Sequence[tuple[str, str]]], limit: float) -> Refused | None:
        """Have it load what is lent."""
        return self._do(limit, "load_lent", ranks)

    def announce(self, header: str, ranks: int, limit: float) -> Refused | None:
        """Tell it what comes."""
        return self._do(limit, "announce", header)

    def join_group(self, seat: GroupSeat, limit: float) -> Refused | None:
        """Have it meet this process."""
        return self._do(limit, "join_group", seat)

    def receive_broadcast(self, entries: Sequence[Entry], group: str, limit: float) -> Refused | None:
        """Have it take part."""
        return self._do(limit, "receive_broadcast", group)

    def end_push(self, header: Header) -> None:
        """Close the push, as `Receivers.end` does."""
        assert self.announce(header.to_json(), 1, 60.0) is None

    def checksums(self) -> dict[str, str]:
        """What it holds."""
        return cast(dict[str, str], self._ask(300.0, "checksums"))

    def close(self) -> None:
        """Have it end."""
        self._connection.close()
        self._process.join(60)

    def _do(self, limit: float, name: str, *arguments: object) -> Refused | None:
        try:
            self._ask(limit, name, *arguments)
        except ValueError as error:
            return Refused(str(error))
        return None

    def _ask(self, limit: float, name: str, *arguments: object) -> object:
        self._connection.send((name, arguments))
        if not self._connection.poll(limit):
            raise ValueError(f"no answer to {name} within {limit:g} s")
        good, answer = self._connection.recv()
        if not good:
            raise ValueError(answer)
        return answer
