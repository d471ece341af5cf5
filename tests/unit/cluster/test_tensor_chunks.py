"""Tensors in parts: what arrives is what was sent, bit for bit, in lists of bounded size."""

from __future__ import annotations

import pytest
import torch

from megasharp.cluster.ray_runtime.rank_actor import Joiner, cut

TENSORS = [
    ("a", torch.arange(5, dtype=torch.float32)),
    ("half", torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()),
    ("transposed", torch.arange(12, dtype=torch.int64).reshape(3, 4).t()),
    ("empty", torch.zeros(0, 3)),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ("flags", torch.tensor([True, False, True])),
]


@pytest.mark.parametrize("limit", [1, 7, 20, 64, 10_000])
def test_tensors_arrive_as_they_were(limit: int) -> None:
    joiner, arrived = Joiner(), []
    for parts in cut(TENSORS, limit):
        assert 0 <= sum(part.data.nbytes for part in parts) <= limit
        arrived += joiner.add(parts)
    assert [name for name, _ in arrived] == [name for name, _ in TENSORS]
    for (_, got), (_, sent) in zip(arrived, TENSORS, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_parts_are_copies() -> None:
    """A rank's weights may change while their bytes are on their way."""
    weight = torch.zeros(4)
    (parts,) = list(cut([("w", weight)]))
    weight += 1.0
    ((_, got),) = Joiner().add(parts)
    assert torch.equal(got, torch.zeros(4))
