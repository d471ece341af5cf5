"""Memory that a process shares with others on its machine: handles, the weights in it, and both as text.

A lender hands its handles out once and names their generation ever after. The generation counts up whenever the memory
may have moved, so that whoever still holds older handles refuses instead of reading what is no longer there
(`shared_weights_import.py`, the other side). Handles are CUDA's on a GPU; a CPU's are names of files in shared memory,
by which all of this is tested. On a GPU it was not run.

torch counts who has a GPU's memory open, and keeps what it frees until all have closed it: one that was killed would
keep a model's weights for ever. So handles are made of a second storage over the same memory, which owns nothing; the
lender must see to it that this memory stays where it is meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megasharp.rollout.sglang.bucket import Stamp

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
            pieces = tuple(_piece(*words) for words in pieces)
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


def _piece(name: str, dim: int, start: int, shape: list[int], dtype: str, storage: int, offset: int) -> Piece:
    return Piece(name, dim, start, tuple(shape), dtype, storage, offset)


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
