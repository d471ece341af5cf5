"""The real Megatron model of a large layout, built without memory and without its other ranks.

Weights are on torch's meta device and the process group is torch's fake one, at the full world size: what Megatron
itself refuses or shapes is found on one machine, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasharp.convert.architecture import Architecture
from megasharp.convert.lora import LoraSettings
from megasharp.mcore.blank import blank_chunks, megatron_groups
from megasharp.types import ParallelLayout


def stage_parameters(
    networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraSettings | None = None
) -> list[list[int]]:
    """Parameters on the first rank of each pipeline stage, per network. `lora`: adapters of the first.

    Call where no process group is initialised. Raises whatever Megatron raises for a layout that it cannot build.
    """
    width = layout.world // layout.pp
    counts = [_on_rank(networks, layout, lora, stage * width) for stage in range(layout.pp)]
    return [list(of_network) for of_network in zip(*counts, strict=True)]


def _on_rank(
    networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraSettings | None, rank: int
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
