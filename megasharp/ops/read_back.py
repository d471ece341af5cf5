"""Sums on a device to metrics on the host, all in one copy: each of its own would wait until the device is idle."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megasharp.types import Mean


def means(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Mean]:
    """From pairs (total, weight) of scalars on one device, of any dtypes; exact for integers below 2^53.

    Example: `means({"a": (torch.tensor(3.0), torch.tensor(2))}) == {"a": Mean(3.0, 2.0)}`.
    """
    if not sums:
        return {}
    numbers = torch.stack([value.double() for pair in sums.values() for value in pair]).tolist()
    return {name: Mean(*pair) for name, pair in zip(sums, zip(numbers[::2], numbers[1::2], strict=True), strict=True)}
