"""Estimated work of packed rows: linear in rows, and in each layer linear in the positions that a row attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a forward pass; a backward pass costs twice as much in every part, so shares are the same.

    `per_row`: each packed row, whatever it sees. `attention`: pairs (window, FLOPs) of groups of layers, the FLOPs for
    each row and each position that it attends to; a row sees `window` positions at most, its own included (None: all
    before it). That selective recomputation does attention's part once more is not counted. `per_token`: each response
    token, where the output layer computes logits of those alone.

    Example: `Flops(2 * 0.5e9, ((None, 4 * 24 * 896),))`, a model of 24 layers with 0.5e9 weights.
    """

    per_row: float
    attention: tuple[tuple[int | None, float], ...] = ()
    per_token: float = 0.0

    def of_runs(self, before: Tensor, rows: Tensor) -> Tensor:
        """FLOPs of runs of `rows` rows that stand behind `before` others each, without their tokens' logits.

        Both int64 of one shape, float64 out.
        """
        total = self.per_row * rows.to(torch.float64)
        for window, per_position in self.attention:
            total += per_position * _positions(before, rows, window).to(torch.float64)
        return total


# Without a model: every row costs the same.
ROWS_ALONE = Flops(1.0)


def _positions(before: Tensor, rows: Tensor, window: int | None) -> Tensor:
    """The sum over a run's rows j = 1 .. rows of min(before + j, window)."""
    growing = rows if window is None else (window - before).clamp(min=0).minimum(rows)
    seen = growing * before + growing * (growing + 1) // 2
    return seen if window is None else seen + (rows - growing) * window
