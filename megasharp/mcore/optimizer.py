"""Megatron's distributed optimizer and learning-rate schedule, and one guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megasharp.mcore.buckets import keep_bucket_padding
from megasharp.mcore.held_on_host import HeldOnHost, hold_on_host, without_gradients
from megasharp.mcore.model import Options


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Adam and its schedule. Steps are optimizer steps; `total_steps` ends the decay."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    warmup_steps: int
    decay: str
    total_steps: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step's figures; `applied` is False when it was skipped on all ranks, as a `spike` or otherwise."""

    applied: bool
    grad_norm: float
    learning_rate: float
    spike: bool = False


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerSettings,
    dtype: torch.dtype,
    options: Options,
    on_host: torch.device | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over this rank's parameters, and its schedule. `on_host`: the device whose steps it streams to."""
    config = OptimizerConfig(
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
        lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
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
    """The optimizers inside a chained one, or the one itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@torch.no_grad()
def guarded_step(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    clip_grad: float,
    loss_is_finite: bool,
    norm_limit: float | None = None,
) -> Stepped:
    """Clip and step, unless any rank saw a non-finite loss or gradient, or the norm is above the limit.

    Then every rank leaves its weights alone.
    """
    lr = float(optimizer.param_groups[0]["lr"])
    bad = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    if _anywhere(bad or not loss_is_finite or not math.isfinite(norm)):
        return Stepped(False, norm, lr)
    # The norm is that of all ranks' gradients, so that all of them see it above the limit, or none.
    if norm_limit is not None and norm > norm_limit:
        return Stepped(False, norm, lr, spike=True)
    if clip_grad > 0.0:
        for part in parts(optimizer):
            held = isinstance(part, HeldOnHost)
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm, use_decoupled_grad=held)
    optimizer.step_with_ready_grads()
    scheduler.step(increment=1)
    return Stepped(True, norm, lr)


def _anywhere(flag: bool) -> bool:
    """Whether any rank of the world raises the flag."""
    votes = torch.tensor([float(flag)], device=torch.cuda.current_device())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())
