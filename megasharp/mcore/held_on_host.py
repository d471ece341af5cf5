"""Megatron's distributed optimizer with its state in host memory (`policy.optimizer_offload`).

What Megatron saves, loads and reduces stays its own; methods that expect gradients beside
main weights are replaced. Its own `optimizer_cpu_offload` steps on the CPU with copies of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megasharp.mcore.streamed_adam import StreamedAdam


class HeldOnHost(DistributedOptimizer):  # type: ignore[misc]
    """A distributed optimizer whose Adam is streamed; a main weight's gradient is its `decoupled_grad`, on the GPU."""

    def _copy_model_grads_to_main_grads(self) -> None:
        models = chain(*self.model_float16_groups, *self.model_fp32_groups)
        mains = chain(*self.shard_fp32_from_float16_groups, *self.shard_fp32_groups)
        for parameter, main in zip(models, mains, strict=True):
            span = self._get_model_param_range_map(parameter)["param"]
            main.decoupled_grad = parameter.main_grad.view(-1)[span.start : span.end]

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Of parameters that no other rank counts, as Megatron's own, in the same order."""
        group = getattr(self, "tp_group", None)
        return [
            p.decoupled_grad
            for p in self.get_parameters()
            if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, group)
        ]

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """The same by its name in Megatron 0.19; groups of their own are multi-token prediction's, which is refused."""
        return self.get_main_grads_for_grad_norm() if grad_norm_group is None else []

    def _copy_main_params_to_model_params(self) -> None:
        """Nothing: the step has written the weights while their copies were on the GPU."""


def hold_on_host(part: DistributedOptimizer, device: torch.device) -> None:
    """Move the state of an optimizer that has not stepped yet to host memory. Raises UserError where it cannot be."""
    if part.is_stub_optimizer:
        return
    mains, weights = chain(*part.shard_fp32_from_float16_groups), chain(*part.shard_float16_groups)
    part.optimizer = StreamedAdam(
        part.optimizer.param_groups, dict(zip(mains, weights, strict=True)), device, part.config.decoupled_weight_decay
    )
    part.init_state_fn = lambda adam, config=None: adam.restore_state()
    # Megatron's own function builds the optimizer, and knows one class of it.
    part.__class__ = HeldOnHost


@contextmanager
def without_gradients(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """No memory for gradients while the block runs; they are zero after it.

    Megatron makes main weights on the GPU, which are as large: so building takes no more than training does.
    """
    storages = [buffer.grad_data.untyped_storage() for chunk in chunks for buffer in chunk.buffers]
    sizes = [storage.size() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    yield
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    for chunk in chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.zero_()
