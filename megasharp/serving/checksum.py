"""A checksum of a tensor's bytes that is computed where the tensor is: the same on a CPU and on a GPU, 64 bits.

A push is verified against mistakes, not against forgers: wrong tensors, places, lengths, generations, or bits. Every
eight bytes are mixed with their position (the finalizer of SplitMix64: Steele, Lea and Flood, 2014) and the results are
added up modulo 2**64. One changed word always changes the sum, for the mixing is one to one; other changes stay unseen
once in 2**64. A cryptographic hash would need all of a GPU's weights on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
