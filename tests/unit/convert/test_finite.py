"""One element that is no number is found, wherever it stands and in every dtype of a checkpoint."""

from __future__ import annotations

import math

import torch
from cases import each_case

from megasharp.convert.record import is_finite


@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each_case("value", [math.nan, math.inf, -math.inf])
def test_one_element_is_found(dtype: torch.dtype, value: float) -> None:
    tensor = torch.randn(37, 29).to(dtype)
    assert is_finite(tensor)
    for place in (0, 500, -1):
        broken = tensor.clone()
        broken.view(-1)[place] = value
        assert not is_finite(broken)


def test_the_largest_values_and_none_at_all_are_finite() -> None:
    assert is_finite(torch.full((9,), torch.finfo(torch.float32).max))
    assert is_finite(torch.empty(0, 4))
