"""A GPTModel without memory: what its parameters are called, their shapes, and how its checkpoint is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch._C._distributed_c10d import HashStore

from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import LoraSettings
from megasharp.mcore.cpu import on_cpu
from megasharp.mcore.model import build_chunks, transformer_config
from megasharp.mcore.parallel import Place, destroy, initialize
from megasharp.types import ParallelLayout


@contextlib.contextmanager
def alone() -> Iterator[Place]:
    """Megatron's groups for this one process, with or without a GPU."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else on_cpu():
            place = initialize(ParallelLayout(), seed=0)
            try:
                yield place
            finally:
                destroy()
    finally:
        dist.destroy_process_group()


def blank_model(arch: Architecture, place: Place, dtype: torch.dtype, lora: LoraSettings | None = None) -> GPTModel:
    """The whole model on the meta device, with its adapters if it has any; call inside `alone()`."""
    config = transformer_config(arch, ParallelLayout(), dtype, "none", {})
    # Megatron's other way names the GPU itself, and so would not stay on the meta device.
    config.use_cpu_initialization = True
    with torch.device("meta"):
        (model,) = build_chunks(config, arch, place, lora)
    return model
