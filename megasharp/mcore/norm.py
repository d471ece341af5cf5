"""RMS normalisation that knows about sequence parallelism.

Megatron's torch wrapper refuses sequence parallelism; all that is missing is the mark on the weight by which
Megatron sums its gradient over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
