"""The file of weights between trainer and engine: what goes in comes out, and damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import each_case

from megasharp.rollout.sglang.bucket import (
    ALIGNMENT,
    Header,
    Stamp,
    checksum,
    flat_size,
    laid_out,
    new_stamp,
    parse_header,
    read_bucket,
    read_header,
    unflattened,
    write_bucket,
)

TENSORS = [
    ("a.weight", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ("b.weight", torch.randn(3, 5).to(torch.bfloat16).t()),
    ("empty", torch.empty(0, 4)),
    ("memory.ids", torch.tensor([7, -1])),
]
STAMP = Stamp(12, None, "ab")
DIGESTS = [checksum(tensor) for _, tensor in TENSORS]


@each_case("checksums", [False, True])
def test_every_tensor_comes_back(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, TENSORS, DIGESTS if checksums else None)
    assert read_header(path) == Header(STAMP, laid_out(TENSORS, DIGESTS if checksums else None))
    found = list(read_bucket(path))
    check_equal(found)


def test_flat_in_memory(tmp_path: Path) -> None:
    entries = laid_out(TENSORS)
    flat = torch.zeros(flat_size(entries), dtype=torch.uint8)
    assert flat.numel() % ALIGNMENT == 0
    for (_, room), (_, tensor) in zip(unflattened(entries, flat), TENSORS, strict=True):
        room.copy_(tensor)
    check_equal(list(unflattened(entries, flat)))
    with pytest.raises(ValueError, match=r"end inside tensor memory\.ids"):
        list(unflattened(entries, flat[:-ALIGNMENT]))
    assert flat_size(()) == 0


def test_headers_survive_json() -> None:
    for stamp in (STAMP, new_stamp(3, 4)):
        header = Header(stamp, laid_out(TENSORS, DIGESTS))
        assert parse_header(header.to_json()) == header
    assert new_stamp(3, 4) != new_stamp(3, 4), "each attempt has a stamp of its own"


@each_case("change", [{"version": None}, {"tensors": [{"name": "a"}]}, {"more": 1}, {"push": None}])
def test_other_headers_are_refused(change: dict[str, object]) -> None:
    raw = {**json.loads(Header(STAMP).to_json()), **change}
    with pytest.raises(ValueError, match="not a header of weights"):
        parse_header(json.dumps(raw))


def check_equal(found: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    for (_, sent), (_, got) in zip(TENSORS, found, strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert torch.equal(got, sent)


def test_no_tensor_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, [])
    assert read_header(path) == Header(STAMP)
    assert list(read_bucket(path)) == []


def test_layout_is_as_described(tmp_path: Path) -> None:
    """Read with nothing but the description in the module."""
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, TENSORS, DIGESTS)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    start = -(-(8 + length) // 64) * 64
    first, scalar = header["tensors"][:2]
    assert (first["dtype"], first["shape"], first["offset"], first["nbytes"]) == ("float32", [2, 3], 0, 24)
    assert first["checksum"] == checksum(TENSORS[0][1])
    assert raw[start : start + 24] == b"".join(value.to_bytes(4, "little") for value in FLOATS_AS_BITS)
    assert scalar["offset"] == ALIGNMENT


FLOATS_AS_BITS = (0, 0x3F800000, 0x40000000, 0x40400000, 0x40800000, 0x40A00000)


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, TENSORS[:1], DIGESTS[:1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"a\.weight does not have the checksum"):
        list(read_bucket(path))
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"end inside tensor a\.weight"):
        list(read_bucket(path))


@each_case("content", [b"", b"short", bytes(200), b"\xff" * 200, b"\x02" + bytes(7) + b"[]"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bucket"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a file of weights"):
        read_header(path)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_bucket(path, STAMP, TENSORS)
    assert path.stat().st_size == 4, "the file of somebody else stays"


def test_only_this_user_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    write_bucket(path, STAMP, TENSORS)
    assert path.stat().st_mode & 0o077 == 0
