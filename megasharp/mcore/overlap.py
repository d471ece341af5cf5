"""Data-parallel communication beside computation: gradients reduced in backward, weights gathered in the next forward.

Megatron reduces a bucket of gradients as soon as the last micro-batch's backward has filled it, and gathers a bucket of
updated weights just before the first module that reads it. The gather is left to the next forward only between two
mini-batches of one step: after the last one something else reads the weights (engines, a checkpoint, the reference).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig

from megasharp.mcore.layer_spec import Wanted
from megasharp.types import ParallelLayout


def overlaps(wanted: Wanted, layout: ParallelLayout, device: torch.device) -> bool:
    """Whether to: with `auto` on GPUs of several data-parallel ranks."""
    return device.type == "cuda" and layout.dp * layout.cp > 1 if wanted == "auto" else wanted


class Overlap:
    """When this rank's chunks reduce and gather. Weights are whole, and gathered, wherever no method says otherwise."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: TransformerConfig) -> None:
        self._chunks = chunks
        self._gathers_in_forward = True
        # Megatron's schedules reduce nothing before the last micro-batch.
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
        self.gather()

    def gather_in_forward(self) -> None:
        """Leave the updated weights to the next forward pass."""
        if not self._gathers_in_forward:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
        self._gathers_in_forward = True

    def gather(self) -> None:
        """Have the updated weights everywhere, now."""
        if self._gathers_in_forward:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        self._gathers_in_forward = False
