"""Many micro-batches as one flat set of tokens, and the way back: what hooks before the update are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megasharp.types import MicroBatch, MiniBatch, StepBatch, TokenInputs


def micro_batches(mini_batches: Sequence[MiniBatch]) -> list[MicroBatch]:
    """All micro-batches, mini-batch by mini-batch and rank by rank."""
    return [micro for mini in mini_batches for rank in mini.per_rank for micro in rank]


def joined(micros: Sequence[MicroBatch]) -> tuple[Tensor, TokenInputs]:
    """Advantages [T] and inputs of all micro-batches as one; sequences are renumbered, groups keep their numbers."""
    counts = [micro.inputs.num_sequences for micro in micros]
    first = [sum(counts[:i]) for i in range(len(counts))]
    seq_T = torch.cat([micro.inputs.seq_T + offset for micro, offset in zip(micros, first, strict=True)])
    fields = {
        field.name: _joined([getattr(micro.inputs, field.name) for micro in micros])
        for field in dataclasses.fields(TokenInputs)
        if field.name not in ("seq_T", "num_sequences")
    }
    inputs = TokenInputs(**fields, seq_T=seq_T, num_sequences=sum(counts))  # type: ignore[arg-type]
    return torch.cat([micro.advantage_T for micro in micros]), inputs


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    held = [part for part in parts if part is not None]
    assert len(held) in (0, len(parts)), "a field is in every micro-batch or in none"
    return torch.cat(held) if held else None


def with_advantages(batch: StepBatch, adv_T: Tensor) -> StepBatch:
    """The step with these advantages, in the order of `joined(micro_batches(batch.mini_batches))`."""
    counts = [micro.advantage_T.numel() for micro in micro_batches(batch.mini_batches)]
    parts = iter(torch.split(adv_T, counts))
    return _with_micro_batches(batch, lambda micro: dataclasses.replace(micro, advantage_T=next(parts)))


def _with_micro_batches(batch: StepBatch, change: Callable[[MicroBatch], MicroBatch]) -> StepBatch:
    mini_batches = tuple(
        dataclasses.replace(mini, per_rank=tuple(tuple(change(micro) for micro in rank) for rank in mini.per_rank))
        for mini in batch.mini_batches
    )
    return dataclasses.replace(batch, mini_batches=mini_batches)
