"""Shares of a step reach the ranks that work on them, bit for bit."""

from __future__ import annotations

import gc

import torch.distributed as dist
from launch import run_ranks
from policies import CPU

from megasharp.common.records import ParallelLayout
from megasharp.learner.parallel import destroy, initialize, megatron_device

EIGHT = (
    ParallelLayout(tp=2, dp=2, pp=2),
    ParallelLayout(cp=2, dp=2, pp=2),
    ParallelLayout(tp=2, cp=2, dp=2),
    ParallelLayout(dp=4, pp=2),
    ParallelLayout(tp=2, dp=4),
    ParallelLayout(dp=2, pp=4, vpp=2),
)


def data_places(rank: int, world: int) -> list[tuple[int, int]]:
    """This rank's data-parallel place at each layout: by our formula, and by Megatron's groups."""
    found = []
    for layout in EIGHT:
        with megatron_device(CPU):
            place = initialize(layout, seed=0, gloo=False)
        found.append((layout.data_rank(dist.get_rank()), place.dp))
        destroy()
        gc.collect()
    return found


def test_data_places_are_those_of_megatrons_groups() -> None:
    """Another order would give ranks a share of their peers' and the sum of gradients would hide it."""
    for rank in run_ranks(8, data_places):
        assert all(ours == theirs for ours, theirs in rank), rank
