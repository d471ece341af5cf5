"""Megatron's GPTModels without memory, for the names and shapes of their parameters.

Weights are on torch's meta device. Of a large layout any rank's model can be built in one process, in seconds: the
process group is then torch's fake one, at the full world size. So Megatron itself shapes the model, or refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig, PolicyConfig
from megasharp.convert.architecture import Architecture
from megasharp.learner.cpu_backend import beside_cuda
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.parallel import Place, destroy, initialize


@contextlib.contextmanager
def megatron_groups(layout: ParallelLayout, *, gloo: bool = True) -> Iterator[Place]:
    """Make Megatron's groups over an initialised torch.distributed, on the CPU with or without a GPU beside it."""
    with beside_cuda():
        place = initialize(layout, seed=0, gloo=gloo)
        try:
            yield place
        finally:
            destroy()


@contextlib.contextmanager
def alone() -> Iterator[Place]:
    """Make Megatron's groups for this one process."""
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
    lora: LoraConfig | None = None,
    layout: ParallelLayout | None = None,
) -> list[GPTModel]:
    """Build a rank's part of the model on the meta device, with `lora`'s adapters; call inside `megatron_groups`."""
    config = transformer_config(arch, layout or ParallelLayout(), dtype, PolicyConfig(), {})
    # Megatron's other way names the GPU itself, and so would not stay on the meta device.
    config.use_cpu_initialization = True
    with torch.device("meta"):
        return build_chunks(config, arch, place, lora)


def blank_model(arch: Architecture, place: Place, dtype: torch.dtype, lora: LoraConfig | None = None) -> GPTModel:
    """Build the whole model on the meta device; call inside `alone()`."""
    (model,) = blank_chunks(arch, place, dtype, lora)
    return model


def stage_parameters(
    networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraConfig | None = None
) -> list[list[int]]:
    """Count the parameters on the first rank of each pipeline stage, per network. `lora`: adapters of the first.

    Call where no process group is initialised. Raises whatever Megatron raises for a layout that it cannot build.
    """
    width = layout.world // layout.pp
    counts = [_count_on_rank(networks, layout, lora, stage * width) for stage in range(layout.pp)]
    return [list(of_network) for of_network in zip(*counts, strict=True)]


def _count_on_rank(
    networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraConfig | None, rank: int
) -> list[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with megatron_groups(layout, gloo=False) as place:
            counts = []
            for number, arch in enumerate(networks):
                chunks = blank_chunks(arch, place, torch.bfloat16, lora if number == 0 else None, layout)
                counts.append(sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()))
            return counts
    finally:
        dist.destroy_process_group()
