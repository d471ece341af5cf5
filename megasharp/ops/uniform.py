"""Uniform random numbers without a generator's state: each is a hash of (seed, position), whatever else is in a batch.

Engine and learner draw by the same hash. SGLang's processes import this file, so it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Positions from here on are for choosing among tokens that were drawn with positions below it.
CHOICE_POSITIONS = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def seeds_to_int64(seeds: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Return Python integers of any size as int64 [len(seeds)], modulo 2^64."""
    return torch.tensor([_wrapped(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, positions: Tensor | int) -> Tensor:
    """Return float64 in [0, 1), multiples of 2^-52, of the inputs' shape, by splitmix64 (Steele et al. 2014).

    `seeds` int64, `positions` int64 of the same shape or one number.
    """
    # The seed is mixed before the position enters: in a sum, a larger seed and a larger position would be the same.
    offset = (positions + 1) * _GOLDEN if isinstance(positions, Tensor) else _wrapped((positions + 1) * _GOLDEN)
    mixed = splitmix64(splitmix64(seeds) + offset)
    return _shift(mixed, 12).to(torch.float64) * 2.0**-52


def _wrapped(value: int) -> int:
    """Return the number of int64's range that is equal modulo 2^64."""
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def splitmix64(x: Tensor) -> Tensor:
    """Return int64 of the shape of `x`, int64 too: a one-to-one map that changes half of the bits for any change."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right and fill with zeros (torch's own shift keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
