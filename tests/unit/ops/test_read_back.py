"""Sums of mixed dtypes arrive exactly, by name."""

from __future__ import annotations

import torch

from megasharp.common.records import Mean
from megasharp.ops.segment import means


def test_every_pair_arrives_under_its_own_name_and_exactly() -> None:
    sums = {
        "a": (torch.tensor(0.1, dtype=torch.float32), torch.tensor(2**40 + 1)),
        "b": (torch.tensor(0.1, dtype=torch.float64), torch.tensor(True)),
    }
    assert means(sums) == {"a": Mean(float(torch.tensor(0.1)), 2.0**40 + 1), "b": Mean(0.1, 1.0)}
    assert means({}) == {}
