"""Weights that engines read in the learner's own memory: both sides, and the handles between them as text.

The learner's side comes first. It hands its handles out once and names their generation ever after. The generation
counts up whenever the memory may have moved, so that an engine with older handles refuses instead of reading what is no
longer there. Handles are CUDA's on a GPU; a CPU's are names of files in shared memory, by which all of this is tested.
On a GPU it was not run.

torch counts who has a GPU's memory open, and keeps what it frees until all have closed it: one that was killed would
keep a model's weights for ever. So handles are made of a second storage over the same memory, which owns nothing; the
learner must keep this memory where it is meanwhile.

An engine plans its copies when a layout comes, and binds them to memory when handles come. A push that brings neither
is a check of three numbers and the copies themselves.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megasharp.rollout.sglang.bucket import TIED_HEAD, Stamp, dtype_of

# Refusals that begin so are resolved by the lender: by handing out everything, and by sending buckets.
NOT_OPEN = "this memory is not open here"
NOT_HELD = "the memory lent here does not hold"
_STANDARD_ERROR = 2


@dataclass(frozen=True, slots=True)
class FileHandle:
    """A CPU storage: a file in shared memory, and who removes it at the end."""

    manager: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A GPU's storage, in the order in which torch takes it: bytes are hexadecimal.

    `device` is the GPU's UUID: each process counts those that it sees.
    """

    device: str
    memory: str
    nbytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_needed: bool


Handle = FileHandle | DeviceHandle


@dataclass(frozen=True, slots=True)
class Memory:
    """A lender's storages. `lasting`: they may stay open after the push. `handles`: None where they were handed out."""

    lender: str
    generation: int
    lasting: bool
    handles: tuple[Handle, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a checkpoint's tensor, from index `start` on in dimension `dim`, all of it in the others.

    It is in the storage of that number, `offset` bytes from its beginning.
    """

    name: str
    dim: int
    start: int
    shape: tuple[int, ...]
    dtype: str
    storage: int
    offset: int


@dataclass(frozen=True, slots=True)
class Loan:
    """All weights of a network, to be copied from exported memory; `pieces` is None where `layout` was sent before."""

    stamp: Stamp
    memory: Memory
    layout: str
    pieces: tuple[Piece, ...] | None = None

    def to_json(self) -> str:
        """The loan as text."""
        pieces = None if self.pieces is None else [astuple(piece) for piece in self.pieces]
        memory = _described(self.memory)
        return json.dumps({"stamp": asdict(self.stamp), "memory": memory, "layout": self.layout, "pieces": pieces})


def memory_to_json(memory: Memory) -> str:
    """The memory as text."""
    return json.dumps(_described(memory))


def parse_memory(text: str) -> Memory:
    """Undo `memory_to_json`. Raises ValueError for anything else."""
    try:
        return _memory(json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("this is no description of lent memory") from error


def parse_loan(text: str) -> Loan:
    """Undo `Loan.to_json`. Raises ValueError for anything else."""
    try:
        raw = json.loads(text)
        pieces = raw["pieces"]
        if pieces is not None:
            pieces = tuple(Piece(name, dim, start, tuple(shape), *rest) for name, dim, start, shape, *rest in pieces)
        return Loan(Stamp(**raw["stamp"]), _memory(raw["memory"]), str(raw["layout"]), pieces)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("this is no description of lent weights") from error


def handle_of(storage: UntypedStorage) -> Handle:
    """A handle, for one process to open once. A CPU's storage moves into shared memory by it, and keeps its size."""
    if storage.device.type == "cpu":
        _let_nothing_be_inherited()
        manager, name, nbytes = storage._share_filename_cpu_()
        return FileHandle(manager.decode(), name.decode(), nbytes)
    alias: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    _, memory, nbytes, offset, counter, counter_offset, event, event_needed = alias._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(storage.device).uuid)
    return DeviceHandle(uuid, memory.hex(), nbytes, offset, counter.hex(), counter_offset, event.hex(), event_needed)


@cache
def _let_nothing_be_inherited() -> None:
    """Keep child processes from inheriting this process's open files: these must close when it ends.

    The first handle starts a program of torch's that lives as long as anyone has the memory open. Pipes and sockets
    that it inherited would outlive this process, whose peers wait for their end.
    """
    for each in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        # The folder's own is closed by now.
        with suppress(OSError):
            if int(each.name) > _STANDARD_ERROR:
                os.set_inheritable(int(each.name), False)


def opened(handle: Handle) -> Tensor:
    """The memory, uint8 [bytes]; open as long as it or a view of it lives. Raises ValueError where it is gone."""
    try:
        if isinstance(handle, FileHandle):
            storage = UntypedStorage._new_shared_filename_cpu(
                handle.manager.encode(), handle.name.encode(), handle.nbytes
            )
        else:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            storage = UntypedStorage._new_shared_cuda(
                _number_of(handle.device),
                bytes.fromhex(handle.memory),
                handle.nbytes,
                handle.offset,
                bytes.fromhex(handle.counter),
                handle.counter_offset,
                bytes.fromhex(handle.event),
                handle.event_needed,
            )
    except RuntimeError as error:
        raise ValueError(f"lent memory cannot be opened: {str(error).splitlines()[0]}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _number_of(uuid: str) -> int:
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise ValueError(f"the memory is of a GPU that is not visible here: {uuid}")


def _described(memory: Memory) -> dict[str, Any]:
    handles = None if memory.handles is None else [astuple(handle) for handle in memory.handles]
    return {**asdict(memory), "handles": handles}


def _memory(raw: dict[str, Any]) -> Memory:
    handles = raw["handles"]
    if handles is not None:
        handles = tuple(_handle(words) for words in handles)
    return Memory(str(raw["lender"]), int(raw["generation"]), bool(raw["lasting"]), handles)


def _handle(words: Sequence[Any]) -> Handle:
    return FileHandle(*words) if len(words) == len(FileHandle.__slots__) else DeviceHandle(*words)


# From here on a copy of its own moves as many bytes a second as one of everything; smaller ones share launches.
_LARGE = 1 << 24


@dataclass(frozen=True, slots=True)
class Goal:
    """Destination of a part of a tensor: `values`, which begin at index `first` in dimension `cut`.

    `shape` is the whole tensor's. `padding` are rows after it that stay zero.
    """

    values: Tensor
    cut: int
    first: int
    shape: tuple[int, ...]
    padding: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Move:
    """One copy: from this part of a piece, given as a (start, length) in each dimension, to `goal`."""

    piece: Piece
    part: tuple[tuple[int, int], ...]
    goal: Tensor


@dataclass(slots=True)
class _Network:
    """State of one lender's network.

    `places` says where its goals were when it was planned; `bound` are the copies while its memory is open.
    """

    layout: str
    pieces: tuple[Piece, ...]
    places: object = None
    moves: tuple[_Move, ...] = ()
    names: frozenset[str] = frozenset()
    padding: tuple[Tensor, ...] = ()
    bound: list[tuple[list[Tensor], list[Tensor]]] | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    generation: int
    lasting: bool
    storages: tuple[Tensor, ...]


class Borrower:
    """All that one process has borrowed."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._networks: dict[str, _Network] = {}
        self._push = ""

    def storages(self, memory: Memory, push: str) -> tuple[Tensor, ...]:
        """The memory's storages, uint8 [bytes] each, opened if they are not yet.

        Raises ValueError, with `NOT_OPEN`, where another generation is open and no handles came.
        """
        if push != self._push:
            # Close handles that an unfinished push left open.
            self.end_push()
            self._push = push
        found = self._open.get(memory.lender)
        if found is None or found.generation != memory.generation:
            self._close(memory.lender)
            if memory.handles is None:
                raise ValueError(f"{NOT_OPEN}: generation {memory.generation} of {memory.lender}")
            storages = tuple(opened(handle) for handle in memory.handles)
            found = self._open[memory.lender] = _Open(memory.generation, memory.lasting, storages)
        return found.storages

    def end_push(self) -> None:
        """Close memory that was exported for one push only: its owner is about to free or to move it."""
        for lender in [lender for lender, found in self._open.items() if not found.lasting]:
            self._close(lender)

    def prepare(self, loan: Loan, goals: Callable[[], Mapping[str, Goal]], places: object) -> frozenset[str]:
        """Have everything ready for `copy`; returns the names of the tensors that it completes.

        `places` must differ after goals have moved: they are then asked for again. Raises ValueError, with `NOT_OPEN`
        where memory or layout is not known here, with `NOT_HELD` where the pieces do not make up what is to be copied.
        """
        lender = loan.memory.lender
        if loan.pieces is not None:
            self._networks[lender] = _Network(loan.layout, loan.pieces)
        network = self._networks.get(lender)
        if network is None or network.layout != loan.layout:
            raise ValueError(f"{NOT_OPEN}: layout {loan.layout} of {lender}")
        storages = self.storages(loan.memory, loan.stamp.push)
        if network.places != places:
            _plan(network, goals())
            network.places = places
        if network.bound is None:
            network.bound = _grouped(_bound(network.moves, storages))
        return network.names

    def copy(self, loan: Loan) -> None:
        """Copy the weights of the loan that was prepared last; on a GPU the copies may still be under way then."""
        network = self._networks[loan.memory.lender]
        assert network.bound is not None, "a loan is prepared before it is copied"
        for targets, sources in network.bound:
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)
        if network.padding:
            torch._foreach_zero_(network.padding)

    def _close(self, lender: str) -> None:
        self._open.pop(lender, None)
        if lender in self._networks:
            self._networks[lender].bound = None


def _plan(network: _Network, goals: Mapping[str, Goal]) -> None:
    moves: list[_Move] = []
    # Elements of each goal that no piece has covered yet.
    left: dict[str, int] = {}
    for piece in network.pieces:
        goal = goals.get(piece.name)
        if goal is None:
            if piece.name.endswith(TIED_HEAD):
                continue  # A tied model's spare copy of its embedding.
            raise ValueError(f"the engine's model has no weight {piece.name}")
        if _others(piece.shape, piece.dim) != _others(goal.shape, piece.dim):
            raise ValueError(f"{piece.name} came with shape {piece.shape}; the whole tensor's is {goal.shape}")
        move = _overlap(piece, goal)
        left.setdefault(piece.name, goal.values.numel())
        if move is not None:
            moves.append(move)
            left[piece.name] -= move.goal.numel()
    for name, count in left.items():
        if count:
            raise ValueError(f"{NOT_HELD} {name} as it is cut here")
    network.moves, network.names, network.bound = tuple(moves), frozenset(left), None
    padding = [goals[name].padding for name in left]
    network.padding = tuple(rows for rows in padding if rows is not None)


def _others(shape: Sequence[int], dim: int) -> list[int]:
    return [size for number, size in enumerate(shape) if number != dim]


def _overlap(piece: Piece, goal: Goal) -> _Move | None:
    """Return the copy from the piece to the goal, parts of one tensor cut in one dimension each; None if disjoint."""
    part, target = [], goal.values
    for dim, size in enumerate(goal.shape):
        low, high = (piece.start, piece.start + piece.shape[dim]) if dim == piece.dim else (0, size)
        first, end = (goal.first, goal.first + goal.values.shape[dim]) if dim == goal.cut else (0, size)
        begin, length = max(low, first), min(high, end) - max(low, first)
        if length <= 0:
            return None
        part.append((begin - low, length))
        target = target.narrow(dim, begin - first, length)
    return _Move(piece, tuple(part), target)


def _bound(moves: Sequence[_Move], storages: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a target and its source."""
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    pairs = []
    for move in moves:
        piece, dtype = move.piece, dtype_of(move.piece.dtype)
        key = piece.storage, dtype
        if key not in typed:
            raw = storages[piece.storage]
            typed[key] = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
        # A piece is contiguous, so a part of it is a strided view of its storage.
        offset = piece.offset // dtype.itemsize
        offset += sum(start * stride for (start, _), stride in zip(move.part, strides, strict=True))
        source = typed[key].as_strided([length for _, length in move.part], strides, offset)
        pairs.append((move.goal, source))
    return pairs


def _grouped(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Lists that each become one call: torch joins small copies into few launches where all are alike."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for number, (target, source) in enumerate(pairs):
        alike = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        key = (target.dtype, source.dtype, alike) if target.nbytes < _LARGE else number
        targets, sources = groups.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())
