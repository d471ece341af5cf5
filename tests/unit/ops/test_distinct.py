"""Proposition 3: enumeration and exact fractions; shards, shapes and dtypes."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.ops.segment import expected_distinct


def random_logp(seed: int, vocabulary: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(scale * torch.randn(vocabulary, generator=generator, dtype=torch.float64), dim=-1)


@each_case("samples", [1, 2, 3, 4])
def test_equals_the_enumeration_of_all_draws(samples: int) -> None:
    logp_V = random_logp(0, 4)
    expected = sum(
        logp_V[list(draw)].sum().exp().item() * len(set(draw)) for draw in itertools.product(range(4), repeat=samples)
    )
    assert abs(expected_distinct(logp_V, samples).item() - expected) < 1e-12


def test_coin_and_certainty_and_impossible_tokens() -> None:
    assert expected_distinct(torch.tensor([0.5, 0.5]).log(), 2).item() == pytest.approx(1.5)
    certain_V = torch.tensor([0.0, -torch.inf, -torch.inf])
    assert expected_distinct(certain_V, 1024).item() == 1.0


@each_case("exponent", [3, 9, 15])
def test_keeps_its_digits_for_tiny_and_for_nearly_certain_tokens(exponent: int) -> None:
    tiny, samples = Fraction(1, 10**exponent), 64
    exact = (1 - (1 - tiny) ** samples) + (1 - tiny**samples)
    logp_V = torch.tensor([float(tiny)], dtype=torch.float64)
    logp_V = torch.cat([torch.log1p(-logp_V), logp_V.log()])
    assert abs(expected_distinct(logp_V, samples).item() - 1.0) == pytest.approx(float(exact - 1), rel=1e-6, abs=3e-16)


def test_leading_shape_dtype_and_no_gradient() -> None:
    logits = torch.randn(3, 5, 7, requires_grad=True)
    got = expected_distinct(torch.log_softmax(logits, dim=-1), 8)
    assert got.shape == (3, 5) and got.dtype == torch.float32 and not got.requires_grad
    assert ((got >= 1.0 - 1e-6) & (got <= 7.0)).all()


def test_parts_of_the_vocabulary_add_up() -> None:
    logp_V = random_logp(1, 12)
    parts = sum(expected_distinct(shard, 16) for shard in logp_V.split(5))
    torch.testing.assert_close(parts, expected_distinct(logp_V, 16))
