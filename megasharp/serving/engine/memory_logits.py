"""Where the memory network's forward leaves its logits for the sampler, in each process of an engine.

One buffer for the engine's whole life: a CUDA graph writes where it wrote when it was captured.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn


class MemoryLogits(nn.Module):
    """float32 [max_rows, V]. A buffer of the model, so that SGLang's sleep and wake keep its address and contents."""

    logits_SV: Tensor
    _present: ClassVar[MemoryLogits | None] = None

    def __init__(self, max_rows: int, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("logits_SV", torch.zeros(max_rows, vocabulary, dtype=torch.float32), persistent=False)
        # The weights' checksums are of weights.
        self.logits_SV._skip_weight_check = True  # type: ignore[attr-defined]
        MemoryLogits._present = self

    def store(self, logits_SV: Tensor) -> None:
        """Keep the rows of one step, in the batch's order."""
        rows, most = logits_SV.shape[0], self.logits_SV.shape[0]
        if rows > most:
            raise RuntimeError(f"{rows} requests in one batch, but the engine was started for at most {most}")
        self.logits_SV[:rows].copy_(logits_SV)


def held(rows: int) -> Tensor | None:
    """The last step's first `rows` rows; None in an engine without a memory network."""
    present = MemoryLogits._present
    return None if present is None else present.logits_SV[:rows]
