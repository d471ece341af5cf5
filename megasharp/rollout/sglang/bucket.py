"""Buckets of weights between trainer and engines: their header, the layout of their bytes, and checksums.

Every bucket has a header, JSON:

    {"version": 12, "memory_version": 3, "push": "5be1f0c9", "tensors": [{"name": "lm_head.weight", "dtype": "float32",
     "shape": [22, 128], "offset": 0, "nbytes": 11264, "checksum": "9f86..."}]}

`version` is the policy version that the tensors belong to, `memory_version` the memory network's, null in a push that
carries none of its weights. `push` names the attempt: buckets of different attempts never add up to one version.
`offset` counts from the first tensor's byte, in multiples of 64; `checksum` is there only where the sender was asked.

A file holds 8 bytes, little-endian, with the length of the header; the header; zeros up to a multiple of 64; the
tensors' bytes. Trainer and engine both use this module, so it imports torch and nothing else.

`checksum` is computed where the tensor is, and is the same on a CPU and on a GPU, 64 bits. It verifies a push against
mistakes, not against forgers: wrong tensors, places, lengths, generations, or bits. Every
eight bytes are mixed with their position (the finalizer of SplitMix64: Steele, Lea and Flood, 2014) and the results are
added up modulo 2**64. One changed word always changes the sum, for the mixing is one to one; other changes stay unseen
once in 2**64. A cryptographic hash would need all of a GPU's weights on the host.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megasharp.common.files import private

# In words: temporaries stay in a CPU's cache, and give a GPU enough to do in one launch.
_CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}
_WORD = 8
_BITS = 64
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """The checksum of a tensor's bytes in row-major order, whatever its strides; 16 hexadecimal digits."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD * _WORD
    # A view of words needs their alignment, which parts of a storage may lack.
    aligned = raw[:whole] if raw.data_ptr() % _WORD == 0 else raw[:whole].clone()
    words = aligned.view(torch.int64)
    # The length counts too: the last word is filled up with zeros.
    total = torch.full((), _signed(raw.numel()), dtype=torch.int64, device=raw.device)
    chunk = _CHUNKS[raw.device.type]
    room = min(chunk, max(1, words.numel()))
    steps = torch.arange(room, dtype=torch.int64, device=raw.device).mul_(_signed(_STEP))
    mixed, shifted = torch.empty_like(steps), torch.empty_like(steps)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        total += _mixed(part, start, steps, mixed[: len(part)], shifted[: len(part)])
    if whole < raw.numel():
        last = torch.zeros(_WORD, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - whole] = raw[whole:]
        total += _mixed(last.view(torch.int64), whole // _WORD, steps[:1], mixed[:1], shifted[:1])
    return f"{int(total) % (1 << _BITS):016x}"


def _mixed(words: Tensor, start: int, steps: Tensor, mixed: Tensor, shifted: Tensor) -> Tensor:
    """The sum of mixed words of which the first has the position `start`; `mixed` and `shifted` are overwritten."""
    torch.add(words, steps[: len(words)], out=mixed)
    mixed.add_(_signed((start + 1) * _STEP))
    for bits, factor in _MIX:
        _fold(mixed, shifted, bits).mul_(_signed(factor))
    return _fold(mixed, shifted, _LAST_SHIFT).sum()


def _fold(mixed: Tensor, shifted: Tensor, bits: int) -> Tensor:
    """Each word exclusive-or itself moved right, with zeros from the left."""
    torch.bitwise_right_shift(mixed, bits, out=shifted)
    shifted.bitwise_and_((1 << (_BITS - bits)) - 1)
    return mixed.bitwise_xor_(shifted)


def _signed(number: int) -> int:
    """The number modulo 2**64 as int64 has it."""
    number %= 1 << _BITS
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


ALIGNMENT = 64
# The header of a push that travels as a Hugging Face folder: a file in it, with every tensor of the push.
FOLDER_HEADER = "megasharp.json"
# Of a tied model a spare copy of its embedding, which is sent where the trainer has it, and which engines leave out.
TIED_HEAD = "lm_head.weight"
_LENGTH_BYTES = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}

Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of one tensor in a bucket; `offset` in bytes from the first tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class Stamp:
    """The push that a bucket belongs to; `memory_version` is None where no memory network's weights are pushed."""

    version: int
    memory_version: int | None
    push: str


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a bucket; without tensors it closes the push."""

    stamp: Stamp
    tensors: tuple[Entry, ...] = ()

    def to_json(self) -> str:
        """The header as the module's docstring has it."""
        tensors = [
            {name: value for name, value in asdict(entry).items() if name != "checksum" or value is not None}
            for entry in self.tensors
        ]
        return json.dumps({**asdict(self.stamp), "tensors": tensors})


def new_stamp(version: int, memory_version: int | None) -> Stamp:
    """The stamp of an attempt that begins now."""
    return Stamp(version, memory_version, secrets.token_hex(4))


def parse_header(text: str | bytes) -> Header:
    """Undo `Header.to_json`. Raises ValueError for anything else."""
    try:
        raw = json.loads(text)
        entries = tuple(Entry(**{**item, "shape": tuple(item["shape"])}) for item in raw.pop("tensors"))
        stamp = Stamp(**raw)
        # A header that another program wrote is refused here.
        int(stamp.version), int(stamp.memory_version or 0), stamp.push.isalnum(), [_DTYPES[e.dtype] for e in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("this is not a header of weights") from error
    return Header(stamp, entries)


def laid_out(tensors: Named, digests: Sequence[str] | None = None) -> tuple[Entry, ...]:
    """Lay the tensors out one after another; `digests` are their checksums, if they are to be compared."""
    entries, offset = [], 0
    for number, (name, tensor) in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype in _DTYPES, (name, dtype)
        digest = None if digests is None else digests[number]
        entries.append(Entry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes, digest))
        offset += _rounded(tensor.nbytes)
    return tuple(entries)


def flat_size(entries: Sequence[Entry]) -> int:
    """Return the number of bytes of the flat tensor, uint8, that holds these entries."""
    return entries[-1].offset + _rounded(entries[-1].nbytes) if entries else 0


def unflattened(entries: Sequence[Entry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors, as views of `data`, uint8 [bytes].

    Raises ValueError where the bytes end too soon, and for a tensor whose checksum differs.
    """
    for entry in entries:
        raw = data[entry.offset : entry.offset + entry.nbytes]
        if raw.numel() != entry.nbytes:
            raise ValueError(f"the bytes end inside tensor {entry.name}")
        if entry.checksum is not None and checksum(raw) != entry.checksum:
            raise ValueError(f"tensor {entry.name} does not have the checksum that was sent with it")
        yield entry.name, raw.view(_DTYPES[entry.dtype]).view(entry.shape)


def write_bucket(path: Path, stamp: Stamp, tensors: Named, digests: Sequence[str] | None = None) -> None:
    """Write CPU tensors to the new file `path`, readable by this user only.

    Raises OSError where the file cannot be written whole (a full /dev/shm), and then leaves none behind.
    """
    entries = laid_out(tensors, digests)
    header = Header(stamp, entries).to_json().encode()
    file = open(path, "xb", opener=private)  # noqa: SIM115 (what was there before must not be removed below)
    try:
        with file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
            file.write(header)
            start = _pad(file)
            for entry, (_, tensor) in zip(entries, tensors, strict=True):
                assert _pad(file) == start + entry.offset
                # uint8 [nbytes]; the same memory where the tensor is contiguous.
                file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> Header:
    """The header of a bucket file. Raises ValueError for a file that is no bucket."""
    return _header(path)[0]


def read_bucket(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a bucket file, on the CPU, over the mapped file: read before the file is removed.

    Raises ValueError for a file that is no bucket or is cut off, and for a tensor whose checksum differs.
    """
    header, start = _header(path)
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    try:
        yield from unflattened(header.tensors, data[start:])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def dtype_of(name: str) -> torch.dtype:
    """The dtype of an entry's name for it. Raises ValueError for a name that is none."""
    if name not in _DTYPES:
        raise ValueError(f"no weights are of dtype {name}")
    return _DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """An entry's name for a dtype."""
    return str(dtype).removeprefix("torch.")


def _header(path: Path) -> tuple[Header, int]:
    """The header, and where the first tensor's bytes start."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # A wrong length must not become an allocation of petabytes.
        text = file.read(min(length, path.stat().st_size))
    try:
        header = parse_header(text)
    except ValueError as error:
        raise ValueError(f"{path}: this is not a file of weights") from error
    return header, _rounded(_LENGTH_BYTES + length)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> int:
    """Zeros up to the next multiple of the alignment; returns the position."""
    position = file.tell()
    file.write(bytes(_rounded(position) - position))
    return _rounded(position)
