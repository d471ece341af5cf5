"""The covariance of advantage and log-prob per token, and picking tokens by it: what clip_cov and kl_cov share.

    cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old)          means over all unmasked tokens (2505.22617)

Tokens are picked over a whole optimizer step; the loss sees one micro-batch and decides by thresholds alone. So both
sides must compute bit for bit the same number: one function, in float64, from values rounded to the inputs' dtype.

Many micro-batches as one flat set of tokens, and the way back: what hooks before the update are given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megasharp.algos.base import Stats
from megasharp.common.records import MicroBatch, MiniBatch, StepBatch, TokenInputs


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


NO_DRAW = -1.0


def covariance_means(adv_T: Tensor, x: TokenInputs) -> dict[str, Tensor]:
    """Means of advantage and old log-prob over unmasked tokens, float64 scalars; 0 where there is no token."""
    assert x.old_logp_T is not None
    mask_T = x.mask_T.double()
    count = mask_T.sum().clamp(min=1.0)
    return {
        "mean_advantage": (_rounded(adv_T, x) * mask_T).sum() / count,
        "mean_logp": (x.old_logp_T.double() * mask_T).sum() / count,
    }


def covariance(adv_T: Tensor, x: TokenInputs, means: Stats) -> Tensor:
    """cov_t, float64 [T]."""
    assert x.old_logp_T is not None
    return (_rounded(adv_T, x) - means["mean_advantage"]) * (x.old_logp_T.double() - means["mean_logp"])


def share_of(x: TokenInputs, share: float) -> int:
    """floor(share N) of the N unmasked tokens, and at least one; shares such as 0.29 of 100 are not cut by rounding."""
    return max(math.floor(share * float(x.mask_T.sum()) + 1e-9), 1)


def draw_threshold(x: TokenInputs, among_T: Tensor, count: int) -> Tensor:
    """The number that exactly `count` of the draws in `among_T` (bool [T]) do not exceed: a scalar.

    All of them where there are fewer; below every draw where there is none to pick.
    """
    assert x.draw_T is not None
    draw = x.draw_T[among_T]
    count = min(count, draw.numel())
    return torch.kthvalue(draw, count).values if count else x.draw_T.new_tensor(NO_DRAW)


def _rounded(adv_T: Tensor, x: TokenInputs) -> Tensor:
    return adv_T.to(x.mask_T.dtype).double()
