"""Statistics over many micro-batches: their tokens as one flat set, and picking tokens by covariance.

Hooks before the update are given the whole step, or one optimizer step, as one `TokenInputs` (`joined`), and calibrated
advantages go back into its micro-batches (`with_advantages`). clip_cov and kl_cov pick tokens of such a set by

    cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old)          means over all unmasked tokens (2505.22617)

Tokens are picked over a whole optimizer step; the loss sees one micro-batch and decides by thresholds alone. So both
sides must compute bit for bit the same number: one function, in float64, from values rounded to the inputs' dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megasharp.algos.base import Stats
from megasharp.common.records import MicroBatch, MiniBatch, StepBatch, TokenInputs


def micro_batches(mini_batches: Sequence[MiniBatch]) -> list[MicroBatch]:
    """Return all micro-batches, mini-batch by mini-batch and rank by rank."""
    return [micro for mini in mini_batches for rank in mini.per_rank for micro in rank]


def joined(micros: Sequence[MicroBatch], draws: bool = True) -> tuple[Tensor, TokenInputs]:
    """Join the advantages [T] and the inputs of micro-batches; sequences are renumbered, groups keep their numbers.

    Draws, which take long to compute, are left out without `draws`.
    """
    left_out = ("seq_T", "num_sequences") if draws else ("seq_T", "num_sequences", "draw_T")
    counts = [micro.inputs.num_sequences for micro in micros]
    first = [sum(counts[:i]) for i in range(len(counts))]
    seq_T = torch.cat([micro.inputs.seq_T + offset for micro, offset in zip(micros, first, strict=True)])
    fields = {
        field.name: _joined([getattr(micro.inputs, field.name) for micro in micros])
        for field in dataclasses.fields(TokenInputs)
        if field.name not in left_out
    }
    inputs = TokenInputs(**fields, seq_T=seq_T, num_sequences=sum(counts))  # type: ignore[arg-type]
    return torch.cat([micro.advantage_T for micro in micros]), inputs


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    held = [part for part in parts if part is not None]
    assert len(held) in (0, len(parts)), "a field is in every micro-batch or in none"
    return torch.cat(held) if held else None


def with_advantages(batch: StepBatch, adv_T: Tensor) -> StepBatch:
    """Return the step with the advantages [T], in the order of `joined(micro_batches(batch.mini_batches))`."""
    counts = [micro.advantage_T.numel() for micro in micro_batches(batch.mini_batches)]
    parts = iter(torch.split(adv_T, counts))

    def changed(rank: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
        return tuple(micro.with_advantages(next(parts)) for micro in rank)

    mini_batches = tuple(
        dataclasses.replace(mini, per_rank=tuple(changed(rank) for rank in mini.per_rank))
        for mini in batch.mini_batches
    )
    return dataclasses.replace(batch, mini_batches=mini_batches)


NO_DRAW = -1.0


def covariance_means(adv_T: Tensor, x: TokenInputs) -> dict[str, Tensor]:
    """Return the means of advantage and old log-prob (nats) over unmasked tokens: float64 scalars, 0 without tokens."""
    assert x.old_logp_T is not None
    mask_T = x.mask_T.double()
    count = mask_T.sum().clamp(min=1.0)
    return {
        "mean_advantage": (_rounded(adv_T, x) * mask_T).sum() / count,
        "mean_logp": (x.old_logp_T.double() * mask_T).sum() / count,
    }


def covariance(adv_T: Tensor, x: TokenInputs, means: Stats) -> Tensor:
    """Return cov_t, float64 [T], with the `means` of `covariance_means`."""
    assert x.old_logp_T is not None
    return (_rounded(adv_T, x) - means["mean_advantage"]) * (x.old_logp_T.double() - means["mean_logp"])


def share_of(x: TokenInputs, share: float) -> int:
    """Return floor(share N) of the N unmasked tokens, at least 1; 0.29 of 100 is not cut to 28 by rounding."""
    return max(math.floor(share * float(x.mask_T.sum()) + 1e-9), 1)


def draw_threshold(x: TokenInputs, among_T: Tensor, count: int) -> Tensor:
    """Return the number, a scalar, that exactly `count` of the draws in `among_T` (bool [T]) do not exceed.

    All of them where there are fewer; a number below every draw where there is none to pick.
    """
    assert x.draw_T is not None
    draw = x.draw_T[among_T]
    count = min(count, draw.numel())
    return torch.kthvalue(draw, count).values if count else x.draw_T.new_tensor(NO_DRAW)


def _rounded(adv_T: Tensor, x: TokenInputs) -> Tensor:
    return adv_T.to(x.mask_T.dtype).double()
