"""Messages between the driver and its ranks: a pickle, with the bytes of tensors beside it.

`Message.of` pickles a value with protocol 5; tensors on the CPU and NumPy arrays leave their bytes out of the pickle,
without a copy where they are contiguous. There are two ways for these bytes to another process of this machine:

- `send` writes them into the pipe after the pickle, and the receiver reads them into memory of its own;
- `Shared` copies them once into an anonymous memory file, of which each receiver gets a descriptor. It maps the same
  pages, privately: what it writes there, nobody else sees. No name exists, so nothing is left behind by a process that
  is killed, and a small /dev/shm does not matter: the file counts as memory of whoever wrote it.

`cluster.ray_runtime` gives Ray the parts of a message as NumPy arrays, which Ray keeps out of its own pickles too.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import struct
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from megasharp.common.errors import RunFailed

# Buffers of fewer bytes stay in the pickle: each has its own line of bookkeeping on the way.
_SMALL = 512
# Messages with fewer bytes beside the pickle go through the pipe, which holds about as many without waiting.
INLINE_BYTES = 64 << 10
# Where a buffer may begin; vector instructions read 64 bytes.
_ALIGNMENT = 64
# Most pieces and bytes of one system call.
_PIECES, _WRITE = 1024, 1 << 30
_HEAD = struct.Struct("<?I")


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A pickle and the buffers that it refers to, in order; bytes that are contiguous, of any length."""

    pickled: bytes
    buffers: Sequence[memoryview]

    @classmethod
    def of(cls, value: object) -> Message:
        """Pickle a value. The buffers are its tensors' own memory where these are contiguous."""
        buffers: list[memoryview] = []
        file = io.BytesIO()

        def is_inside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _SMALL:
                return True
            buffers.append(raw)
            return False

        pickler = pickle.Pickler(file, protocol=5, buffer_callback=is_inside)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(value)
        return cls(file.getvalue(), buffers)

    def value(self) -> Any:
        """Return the value, whose tensors lie in the buffers' memory."""
        return pickle.loads(self.pickled, buffers=self.buffers)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        return [buffer.nbytes for buffer in self.buffers]


def _reduce(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    """Reduce a tensor to its bytes; where it is more than plain memory of this process, as PyTorch does."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__:
        reduced: tuple[Callable[..., Tensor], tuple[object, ...]] = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reduced
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _rebuild(data: memoryview | bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    view = memoryview(data)
    if view.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if view.readonly:
        # Peers on a Ray node read one object; nobody writes into what was sent.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(data, dtype=dtype).reshape(shape)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


# Looked up by exact type: a Parameter, for one, is pickled as PyTorch does.
_REDUCERS: ChainMap[type, Callable[[Any], Any]] = ChainMap({Tensor: _reduce}, copyreg.dispatch_table)


def send(connection: Connection, message: Message) -> None:
    """Send a message through the pipe alone; returns when all but the last bytes were read."""
    connection.send_bytes(_head(message, False))
    _write_all(message.buffers, lambda pieces, _: os.writev(connection.fileno(), pieces))


def receive(connection: Connection) -> Any:
    """Return the next value that was sent. Raises EOFError where the other side is gone."""
    data = connection.recv_bytes()
    mapped, count = _HEAD.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    begins, total = _places(sizes)
    if mapped:
        memory = _map(reduction.recv_handle(connection), total)
    else:
        memory = torch.empty(total, dtype=torch.uint8).numpy().data
    views = [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
    if not mapped:
        for view in views:
            _read_all(connection.fileno(), view)
    return pickle.loads(memoryview(data)[_HEAD.size + 8 * count :], buffers=views)


class Shared:
    """A message for several processes of this machine, which map the bytes of its buffers from one memory file.

    A message with few of them goes through the pipes. Close it when it was sent to all: receivers keep what they need.
    Raises RunFailed where there is no memory for it.
    """

    def __init__(self, message: Message) -> None:
        self._message = message
        self._file: int | None = None
        begins, total = _places(message.sizes)
        if total < INLINE_BYTES:
            return
        self._file = os.memfd_create("megasharp-call")
        try:
            os.ftruncate(self._file, total)
            for buffer, begin in zip(message.buffers, begins, strict=True):
                _write_all([buffer], self._write_at(begin))
        except OSError as error:
            self.close()
            raise RunFailed(f"no memory for {total / 1e6:.2f} MB that ranks of this machine share: {error}") from error

    def _write_at(self, begin: int) -> Callable[[Sequence[memoryview], int], int]:
        return lambda pieces, done: os.pwritev(self._descriptor, pieces, begin + done)

    @property
    def _descriptor(self) -> int:
        assert self._file is not None
        return self._file

    def send(self, connection: Connection, process: int) -> None:
        """Send it to the process of that id at the other end."""
        if self._file is None:
            send(connection, self._message)
        else:
            connection.send_bytes(_head(self._message, True))
            reduction.send_handle(connection, self._file, process)

    def close(self) -> None:
        """Give the memory back, once receivers have too."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _head(message: Message, mapped: bool) -> bytes:
    sizes = message.sizes
    return _HEAD.pack(mapped, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + message.pickled


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each buffer begins, and the bytes of all."""
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    return [0, *ends[:-1]][: len(ends)], ends[-1] if ends else 0


def _map(file: int, size: int) -> memoryview:
    """Map a memory file, and close its descriptor; the mapping ends with the last tensor in it."""
    try:
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))
    finally:
        os.close(file)


def _write_all(buffers: Sequence[memoryview], write: Callable[[Sequence[memoryview], int], int]) -> None:
    """Call `write(pieces, bytes already written)`, which returns how many bytes it wrote, until all are."""
    done, first = 0, 0
    left = [piece for buffer in buffers for piece in _pieces(buffer)]
    while first < len(left):
        written = write(left[first : first + _PIECES], done)
        done += written
        while first < len(left) and written >= left[first].nbytes:
            written -= left[first].nbytes
            first += 1
        if written:
            left[first] = left[first][written:]


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[begin : begin + _WRITE] for begin in range(0, view.nbytes, _WRITE))


def _read_all(file: int, view: memoryview) -> None:
    while view.nbytes:
        read = os.readv(file, [view[:_WRITE]])
        if read == 0:
            raise EOFError("the other side is gone")
        view = view[read:]
