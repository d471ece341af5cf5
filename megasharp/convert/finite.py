"""Whether weights are numbers: one NaN or infinity in a checkpoint makes every loss NaN, without a word of where."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; takes no memory of the tensor's size."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) and torch.isfinite(high))
