"""The reference's weights are in place while a block runs, and the policy's after it, however it ends."""

from __future__ import annotations

import pytest
import torch

from megasharp.learner.offload import Reference


def test_an_exception_leaves_the_policys_weights() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    reference = Reference([weight])
    weight.data.copy_(torch.tensor([3.0, 4.0]))
    place = weight.data_ptr()
    with pytest.raises(RuntimeError, match="a pass failed"), reference.in_place():
        assert weight.tolist() == [1.0, 2.0]
        raise RuntimeError("a pass failed")
    assert weight.tolist() == [3.0, 4.0] and weight.data_ptr() == place
    with reference.in_place():
        assert weight.tolist() == [1.0, 2.0]
    assert weight.tolist() == [3.0, 4.0]
