"""How well a step was packed: rows that only pad, and what the largest rank has more to do than the mean."""

from __future__ import annotations

import torch

from megasharp.batching.flops import Flops
from megasharp.batching.planning import imbalance
from megasharp.types import Mean, Metrics, MicroBatch, MiniBatch, StepBatch


def packing_metrics(batch: StepBatch, flops: Flops) -> Metrics:
    """Figures of the packed rows as they are computed.

    - `batch/padding`: share of rows that are padding, over all ranks.
    - `batch/imbalance`: FLOPs of the largest data-parallel rank over the ranks' mean, minus 1. Ranks meet once for each
      optimizer step, so of several mini-batches the largest ones add up.
    - `batch/micro_batches`: micro-batches of a rank, over all optimizer steps.
    """
    micros = [micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]
    largest = mean = 0.0
    for mini in batch.mini_batches:
        loads = rank_flops(mini, flops)
        mean += sum(loads) / len(loads)
        largest += sum(loads) / len(loads) * (1.0 + imbalance(loads))
    return {
        "batch/padding": Mean(float(sum(m.padding for m in micros)), float(sum(m.tokens_P.numel() for m in micros))),
        "batch/imbalance": Mean(largest - mean, mean),
        "batch/micro_batches": Mean(float(sum(len(mini.per_rank[0]) for mini in batch.mini_batches)), 1.0),
    }


def rank_flops(mini: MiniBatch, flops: Flops) -> list[float]:
    """Estimated FLOPs of a forward pass on each data-parallel rank, padding included."""
    return [sum(micro_batch_flops(micro, flops) for micro in rank) for rank in mini.per_rank]


def micro_batch_flops(micro: MicroBatch, flops: Flops) -> float:
    """Estimated FLOPs of a forward pass of one micro-batch, padding included."""
    runs = micro.segments
    before = torch.where(runs.prefix >= 0, runs.length[runs.prefix.clamp(min=0)], 0)
    return float(flops.of_runs(before, runs.length).sum()) + flops.per_token * micro.targets_T.numel()
