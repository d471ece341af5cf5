"""A mend for Megatron's `fully_reshardable` checkpoints (0.16 to 0.19): moments of several buckets, saved right.

On saving, Megatron joins a buffer's buckets without the padding between them, then cuts parameters out of the result
by offsets that count the padding. From the second bucket on, every master weight and moment is then another
parameter's. A tied embedding on the last pipeline stage has a bucket of its own, and so has every 40M parameters
where gradient reduction overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def keep_bucket_padding(optimizer: DistributedOptimizer) -> None:
    """Make this optimizer's gathered state keep the padding, so that Megatron's offsets are right."""
    gather = optimizer.get_parameter_state_dp_zero

    def gather_padded(*args: Any, **kwargs: Any) -> Mapping[Any, Any] | None:
        state: Mapping[Any, Any] | None = gather(*args, **kwargs)
        if state is not None:
            for index, buffer in enumerate(optimizer.buffers):
                for tensors in state[index].values():
                    tensors.update({key: _padded(x, buffer) for key, x in tensors.items() if torch.is_tensor(x)})
        return state

    optimizer.get_parameter_state_dp_zero = gather_padded


def _padded(unpadded: Tensor, buffer: Any) -> Tensor:
    if len(buffer.buckets) == 1:
        return unpadded
    padded = unpadded.new_zeros(buffer.numel)
    taken = 0
    for bucket in buffer.buckets:
        piece = unpadded[taken : taken + bucket.numel_unpadded]
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = piece
        taken += bucket.numel_unpadded
    return padded
