"""Uniform numbers by hash: against Python integers, and that one number never depends on its neighbours."""

from __future__ import annotations

import torch

from megasharp.ops.uniform import CHOICE_POSITIONS, seeds_to_int64, uniforms

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    """Its first output for seed 0 is published: 0xE220A8397B1DCDAF."""
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_equals_the_hash_in_python_integers() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, 7773704118079628555]
    for position in (0, 1, 511, CHOICE_POSITIONS, CHOICE_POSITIONS + 77):
        expected = [(splitmix((splitmix(s & MASK) + (position + 1) * GOLDEN) & MASK) >> 12) * 2.0**-52 for s in seeds]
        assert uniforms(seeds_to_int64(seeds), position).tolist() == expected
        positions = torch.full((len(seeds),), position)
        assert uniforms(seeds_to_int64(seeds), positions).tolist() == expected


def test_spread_is_uniform_over_positions_and_seeds() -> None:
    """Kolmogorov-Smirnov distance of 40,000 numbers, far below its 1 % bound of 0.0082."""
    seeds = seeds_to_int64(range(200)).repeat_interleave(200)
    values = uniforms(seeds, torch.arange(200).repeat(200)).sort().values
    assert float((values - torch.arange(1, 40_001) / 40_000).abs().max()) < 0.0082
