"""Messages between driver and ranks: every value arrives as it was, and bytes are copied no more often than said."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasharp.common.errors import RunFailed
from megasharp.learner.ranks import messages
from megasharp.learner.ranks.messages import INLINE_BYTES, Message, Shared, receive, send

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A record like those that travel."""

    ids_P: torch.Tensor
    logp_T: torch.Tensor | None
    rows: np.ndarray[Any, Any]


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def tensors(numel: int) -> dict[str, torch.Tensor]:
    """Every dtype, with values of all bits, and shapes and strides that are not the plain ones."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 16 * numel, dtype=np.uint8))
    found = {str(dtype): (bits & 1 if dtype is torch.bool else bits).view(dtype)[:numel] for dtype in DTYPES}
    matrix = torch.arange(float(4 * numel)).reshape(4, numel)
    found |= {"transposed": matrix.T, "strided": matrix[:, ::3], "expanded": torch.ones(1).expand(numel)}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "conjugated": torch.ones(numel) * 1j}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(ours, theirs)


@pytest.mark.parametrize("numel", [1, 1000, 100_000])
@pytest.mark.parametrize("mapped", [False, True])
def test_tensors_arrive_bit_for_bit(pipe: tuple[Connection, Connection], numel: int, mapped: bool) -> None:
    """Small ones in the pickle, large ones beside it, through the pipe and in a memory file; NaNs keep their bits."""
    value = tensors(numel)
    value["conjugated"] = value["conjugated"].conj()
    shared = Shared(Message.of(value))
    sender = threading.Thread(
        target=(lambda: shared.send(pipe[0], os.getpid())) if mapped else (lambda: send(pipe[0], Message.of(value)))
    )
    sender.start()
    got = receive(pipe[1])
    sender.join()
    shared.close()
    assert got.keys() == value.keys()
    for name, tensor in value.items():
        assert same_bits(got[name].resolve_conj(), tensor.resolve_conj()), name


def test_records_arrive_with_what_stands_beside_tensors(pipe: tuple[Connection, Connection]) -> None:
    """Tensors may be written into on the other side, as those of a pickle; one that stands twice is one."""
    ids = torch.arange(10_000, dtype=torch.int32)
    value = (Share(ids, None, np.arange(5_000.0)), [ids], {"weight": torch.nn.Parameter(torch.ones(2000))})
    threading.Thread(target=lambda: send(pipe[0], Message.of(value)), daemon=True).start()
    named = torch.zeros(2000)
    named.label = "kept"  # type: ignore[attr-defined]
    assert Message.of(named).value().label == "kept"
    share, (again,), parameters = receive(pipe[1])
    assert isinstance(parameters["weight"], torch.nn.Parameter)
    assert again is share.ids_P and share.logp_T is None
    share.ids_P.add_(1)
    share.rows[:] += 1
    assert torch.equal(share.ids_P, ids + 1) and share.rows[-1] == 5_000.0


def test_the_bytes_of_tensors_are_neither_copied_nor_pickled() -> None:
    """A slice takes its own bytes along, not its storage's, as PyTorch's pickle would."""
    whole = torch.arange(1_000_000, dtype=torch.int32)
    message = Message.of({"whole": whole, "part": whole[10:2010], "turned": whole.reshape(1000, 1000).T})
    assert message.sizes == [4_000_000, 8_000, 4_000_000]
    assert len(message.pickled) < 500
    places = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in message.buffers]
    assert places[:2] == [whole.data_ptr(), whole.data_ptr() + 40]
    assert places[2] != whole.data_ptr(), "the one that is not contiguous is copied"
    received = Message(message.pickled, message.buffers).value()
    assert received["part"].data_ptr() == whole.data_ptr() + 40


def test_a_memory_file_is_mapped_by_all_and_written_by_none(pipe: tuple[Connection, Connection]) -> None:
    """Receivers see the same pages of one file, each its own changes; descriptors end with the tensors."""
    before, whole = open_files(), torch.arange(INLINE_BYTES, dtype=torch.int32)
    shared = Shared(Message.of(whole))
    for _ in range(2):
        shared.send(pipe[0], os.getpid())
    shared.close()
    first, second = receive(pipe[1]), receive(pipe[1])
    assert len(set(mapped_files())) == 1 and len(mapped_files()) == 2
    first += 1
    assert torch.equal(second, whole) and torch.equal(first, whole + 1)
    del first, second
    gc.collect()
    assert open_files() == before and mapped_files() == []


def mapped_files() -> list[str]:
    """The inodes of our memory files that this process maps, one for each mapping."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line.split()[4] for line in lines if "memfd:megasharp-call" in line]


def open_files() -> int:
    # Other tests' garbage may hold some.
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


def test_small_messages_need_no_file(monkeypatch: pytest.MonkeyPatch, pipe: tuple[Connection, Connection]) -> None:
    monkeypatch.setattr(os, "memfd_create", None)
    value = {"norm_limit": 1.0, "rows": torch.arange(1000)}
    Shared(Message.of(value)).send(pipe[0], os.getpid())
    assert torch.equal(receive(pipe[1])["rows"], value["rows"])  # type: ignore[arg-type]


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed too: nobody would use what was written."""

    def refused(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = open_files()
    monkeypatch.setattr(os, "pwritev", refused)
    for count, size in ((1_000_000, r"4\.00"), (20_000, r"0\.08")):
        with pytest.raises(RunFailed, match=rf"no memory for {size} MB .*No space left on device"):
            Shared(Message.of(torch.zeros(count)))
    assert open_files() == before


def test_a_sender_that_ends_early_is_an_end_of_file(pipe: tuple[Connection, Connection]) -> None:
    """In the middle of a message, as by kill -9, at each place where one may end."""
    message = Message.of(torch.zeros(100_000))
    head = messages._head(message, True)
    pipe[0].send_bytes(head)
    pipe[0].close()
    with pytest.raises(EOFError):
        receive(pipe[1])
    for written in (0, 1000):
        ours, theirs = Pipe()
        with theirs:
            ours.send_bytes(messages._head(message, False))
            os.write(ours.fileno(), b"\0" * written)
            ours.close()
            with pytest.raises((EOFError, OSError)):
                receive(theirs)


def test_large_buffers_take_several_calls(monkeypatch: pytest.MonkeyPatch, pipe: tuple[Connection, Connection]) -> None:
    """One call writes 2 GiB at most, and may write less than asked."""
    monkeypatch.setattr(messages, "_WRITE", 1000)
    monkeypatch.setattr(messages, "_PIECES", 3)
    value = [torch.randn(n) for n in (3_000, 129, 1, 50_001)]
    with_file, sent = Shared(Message.of(value)), threading.Thread(target=lambda: send(pipe[0], Message.of(value)))
    with_file.send(pipe[0], os.getpid())
    assert all(map(torch.equal, receive(pipe[1]), value))
    sent.start()
    assert all(map(torch.equal, receive(pipe[1]), value))
    sent.join()
