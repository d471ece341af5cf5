"""GPTModels without memory: what their parameters are called, their shapes, and how their checkpoint is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch._C._distributed_c10d import HashStore

from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import LoraSettings
from megasharp.mcore.cpu import beside_cuda
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.parallel import Place, destroy, initialize
from megasharp.types import ParallelLayout


@contextlib.contextmanager
def megatron_groups(layout: ParallelLayout, *, gloo: bool = True) -> Iterator[Place]:
    """Megatron's groups over an initialised torch.distributed, on the CPU with or without a GPU beside it."""
    with beside_cuda():
        place = initialize(layout, seed=0, gloo=gloo)
        try:
            yield place
        finally:
            destroy()


@contextlib.contextmanager
def alone() -> Iterator[Place]:
    """Megatron's groups for this one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with megatron_groups(ParallelLayout()) as place:
            yield place
    finally:
        dist.destroy_process_group()


def blank_chunks(
    arch: Architecture,
    place: Place,
    dtype: torch.dtype,
    lora: LoraSettings | None = None,
    layout: ParallelLayout | None = None,
) -> list[GPTModel]:
    """A rank's part of the model on the meta device, with its adapters if it has any; call inside `megatron_groups`."""
    config = transformer_config(arch, layout or ParallelLayout(), dtype, "none", {})
    # Megatron's other way names the GPU itself, and so would not stay on the meta device.
    config.use_cpu_initialization = True
    with torch.device("meta"):
        return build_chunks(config, arch, place, lora)


def blank_model(arch: Architecture, place: Place, dtype: torch.dtype, lora: LoraSettings | None = None) -> GPTModel:
    """The whole model on the meta device; call inside `alone()`."""
    (model,) = blank_chunks(arch, place, dtype, lora)
    return model
