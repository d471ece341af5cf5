"""Two models' outputs side by side, compared where both are numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How far two outputs of one part are apart where both are finite.

    `largest` is absolute, `relative` to the largest of A's values there; both are 0 where no value is finite in both.
    `compared` of `total` values are; `same_places` is whether those that are not finite in A are not in B, and the
    other way round.
    """

    largest: float
    relative: float
    compared: int
    total: int
    same_places: bool


def output_difference(mine: Tensor, theirs: Tensor) -> OutputDifference:
    """Of two float32 outputs of one shape, which is any."""
    is_mine, is_theirs = mine.isfinite(), theirs.isfinite()
    both = is_mine & is_theirs
    a, b = mine.where(both, 0), theirs.where(both, 0)
    largest = (a - b).abs().max()
    return OutputDifference(
        largest=float(largest),
        relative=float(largest / a.abs().max().clamp(min=torch.finfo(torch.float32).tiny)),
        compared=int(both.sum()),
        total=both.numel(),
        same_places=bool(torch.equal(is_mine, is_theirs)),
    )
