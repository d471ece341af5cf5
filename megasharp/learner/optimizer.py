"""Megatron's distributed optimizer and learning-rate schedule, and one guarded optimizer step.

`Overlap` hides data-parallel communication behind computation. Megatron reduces a bucket of gradients as soon as the
last micro-batch's backward has filled it, and gathers a bucket of updated weights just before the first module that
reads it. The gather is left to the next forward only between two mini-batches of one step: after the last one something
else reads the weights (engines, a checkpoint, the reference).

`keep_bucket_padding` fixes Megatron's `fully_reshardable` checkpoints (0.16 to 0.19) for buffers of several buckets. On
saving, Megatron joins the buckets without the padding between them, then cuts parameters out of the result by offsets
that count the padding. From the second bucket on, every master weight and moment would be another parameter's. A tied
embedding on the last pipeline stage has a bucket of its own, and so has every 40M parameters where gradient reduction
overlaps with the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import OptimizerConfig, Wanted
from megasharp.learner.model import Options
from megasharp.learner.optimizer_offload import HeldOnHost, hold_on_host, without_gradients


def overlaps(wanted: Wanted, layout: ParallelLayout, device: torch.device) -> bool:
    """Decide whether communication overlaps with computation: with `auto` on GPUs with dp x cp above 1."""
    return device.type == "cuda" and layout.dp * layout.cp > 1 if wanted == "auto" else wanted


class Overlap:
    """Reduction and gathering of this rank's chunks. Weights are whole unless `gather_in_forward` was the last call."""

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
        """Gather the updated weights now, on every rank."""
        if self._gathers_in_forward:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        self._gathers_in_forward = False


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


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step's metrics; `applied` is False when it was skipped on all ranks, as a `spike` or otherwise."""

    applied: bool
    grad_norm: float
    learning_rate: float
    spike: bool = False


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerConfig,
    total_steps: int,
    dtype: torch.dtype,
    options: Options,
    on_host: torch.device | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return the optimizer over this rank's parameters, and its schedule, which ends at optimizer step `total_steps`.

    `on_host`: the optimizer's state is in host memory, and steps are computed on this device. `options` are the
    optimizer's part of `sort_options`.
    """
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        **options,
    )
    with nullcontext() if on_host is None else without_gradients(chunks):
        optimizer = get_megatron_optimizer(config, list(chunks))
        for part in parts(optimizer):
            keep_bucket_padding(part)
            if on_host is not None:
                hold_on_host(part, on_host)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(total_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers inside a chained one, or the one itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@torch.no_grad()
def guarded_step(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    clip_grad: float,
    loss_is_finite: bool,
    norm_limit: float | None = None,
) -> Stepped:
    """Clip and step, unless any rank saw a non-finite loss or gradient, or the norm is above `norm_limit`.

    Every rank leaves its weights unchanged then. `clip_grad`: the largest global norm, 0 for no clipping.
    """
    lr = float(optimizer.param_groups[0]["lr"])
    bad = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    # One vote of a rank stops all: a rank that stepped alone would have other weights than its peers.
    vote = torch.tensor(
        [float(bad or not loss_is_finite or not math.isfinite(norm))], device=torch.cuda.current_device()
    )
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    if vote.item():
        return Stepped(False, norm, lr)
    # The norm is of all ranks' gradients, so either all of them see it above the limit, or none.
    if norm_limit is not None and norm > norm_limit:
        return Stepped(False, norm, lr, spike=True)
    if clip_grad > 0.0:
        for part in parts(optimizer):
            held = isinstance(part, HeldOnHost)
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm, use_decoupled_grad=held)
    optimizer.step_with_ready_grads()
    scheduler.step(increment=1)
    return Stepped(True, norm, lr)
