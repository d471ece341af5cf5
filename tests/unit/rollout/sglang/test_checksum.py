"""The checksum against the same in Python's own integers; what it must tell apart, and what must not matter to it."""

from __future__ import annotations

import random

import pytest
import torch
from cases import each_case

from megasharp.rollout.sglang import bucket as module
from megasharp.rollout.sglang.bucket import checksum

ALL = 2**64


def plainly(raw: bytes) -> str:
    """As the module's docstring has it, word by word."""
    total = len(raw)
    for number, start in enumerate(range(0, len(raw), 8)):
        x = (int.from_bytes(raw[start : start + 8].ljust(8, b"\0"), "little") + (number + 1) * 0x9E3779B97F4A7C15) % ALL
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % ALL
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % ALL
        total += x ^ (x >> 31)
    return f"{total % ALL:016x}"


def tensor_of(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


@each_case("count", [0, 1, 7, 8, 9, 64, 1000, 4099])
@each_case("chunk", [1, 3, 1 << 18])
def test_it_is_what_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch, count: int, chunk: int) -> None:
    monkeypatch.setitem(module._CHUNKS, "cpu", chunk)
    raw = random.Random(count).randbytes(count)
    assert checksum(tensor_of(raw)) == plainly(raw)
    assert checksum(tensor_of(b"\xff" * count)) == plainly(b"\xff" * count)


def test_strides_and_places_do_not_matter() -> None:
    tensor = torch.randn(37, 11).bfloat16()
    assert checksum(tensor.T.contiguous().T) == checksum(tensor)
    assert checksum(torch.cat([torch.zeros(1, dtype=torch.bfloat16), tensor.flatten()])[1:]) == checksum(tensor)
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0]))


def test_every_bit_matters() -> None:
    raw = bytearray(random.Random(1).randbytes(29))
    want = checksum(tensor_of(bytes(raw)))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert checksum(tensor_of(bytes(raw))) != want
        raw[bit // 8] ^= 1 << bit % 8


def test_what_sync_gets_wrong_is_told_apart() -> None:
    """Rows that changed places, even far apart and alike but for one bit; lengths; a rounded value; signs of zero."""
    tensor = torch.zeros(1 << 17, 4, dtype=torch.bfloat16)
    tensor[0, 3] = 1.0
    other = torch.zeros_like(tensor)
    other[1 << 16, 3] = 1.0
    assert checksum(tensor) != checksum(other)
    values = torch.randn(64, 32)
    found = {
        checksum(each)
        for each in (
            values,
            values.flip(0),
            values.T,
            values[:-1],
            torch.cat([values, torch.zeros(1, 32)]),
            values.bfloat16(),
            values.bfloat16().float(),
        )
    }
    assert len(found) == 7
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
