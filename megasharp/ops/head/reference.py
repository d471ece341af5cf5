"""The two passes over a shard's logits in plain torch: any device, any strides, every floating dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megasharp.ops.head.records import (
    VANISHED,
    Arithmetic,
    Incoming,
    Request,
    ShardPart,
    Softmax,
    VocabShard,
    statistics_dtype,
)


def part(logits_TVp: Tensor, target_T: Tensor, request: Request) -> ShardPart:
    """Compute the shard's sums and candidates (`ShardPart`), with two temporaries of the logits' size at most."""
    shard, dtype = request.shard, statistics_dtype(logits_TVp)
    if not shard.valid:
        zero_T = torch.zeros(target_T.shape, dtype=dtype, device=target_T.device)
        none_TN = zero_T[:, None][:, :0]
        candidates = (none_TN, none_TN.long()) if request.topn else (None, None)
        lowest_T = torch.full_like(zero_T, -math.inf)
        return ShardPart(lowest_T, zero_T, zero_T if request.entropy else None, zero_T, *candidates)
    max_T = logits_TVp[:, : shard.valid].amax(1).to(dtype)
    column_T1, owned_T1 = _local_columns(target_T[:, None], shard, logits_TVp.shape[1])
    own_T = logits_TVp.gather(1, column_T1).masked_fill(~owned_T1, 0)[:, 0].to(dtype)
    # A row that is -inf throughout has sums of 0 here, and none of -inf - -inf.
    shifted_TV = logits_TVp[:, : shard.valid] - max_T.masked_fill(max_T == -math.inf, 0)[:, None]
    _divide(shifted_TV, request.temperature)
    exp_TV = shifted_TV.exp() if request.entropy else shifted_TV.exp_()
    sum_T = exp_TV.sum(1)
    weighted_T = shifted_TV.clamp_(min=VANISHED).mul_(exp_TV).sum(1) if request.entropy else None
    if not request.topn:
        return ShardPart(max_T, sum_T, weighted_T, own_T, None, None)
    del shifted_TV, exp_TV
    logit_TN, column_TN = _top_of_shard(logits_TVp[:, : shard.valid], request.topn)
    return ShardPart(max_T, sum_T, weighted_T, own_T, logit_TN, column_TN + shard.start)


def gradient(
    out_TVp: Tensor, logits_TVp: Tensor, target_T: Tensor, softmax: Softmax, incoming: Incoming, request: Request
) -> None:
    """Write the loss's gradient by the logits into `out_TVp`, which may be the logits themselves.

    Temporaries of their size: a float32 one where `out_TVp` has another dtype, and one for the gradient of the entropy.
    """
    target_grad_TN = None if incoming.logp_T is None else incoming.logp_T[:, None]
    sparse = [*_present(target_T[:, None], target_grad_TN), *_present(softmax.topn_id_TN, incoming.topn_TN)]
    logp_sum_T = sum((grad_TN.sum(1) for _, grad_TN in sparse), start=torch.zeros_like(softmax.max_T))
    entropy_term = next(iter(_present(softmax.entropy_T, incoming.entropy_T)), None)
    exact = out_TVp.dtype == softmax.max_T.dtype
    gradient_TVp = out_TVp if exact else torch.empty_like(out_TVp, dtype=softmax.max_T.dtype)
    _dense_gradient(gradient_TVp, logits_TVp, softmax, logp_sum_T, entropy_term, request)
    for ids_TN, grad_TN in sparse:
        column_TN, owned_TN = _local_columns(ids_TN, request.shard, gradient_TVp.shape[1])
        added_TN = (grad_TN / request.temperature).masked_fill(~owned_TN, 0)
        gradient_TVp.scatter_add_(1, column_TN, added_TN)
    if not exact:
        out_TVp.copy_(gradient_TVp)


REFERENCE = Arithmetic(part, gradient)


def _present(value: Tensor | None, gradient: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the pair where the output exists and the loss used it, else nothing."""
    return [] if value is None or gradient is None else [(value, gradient)]


def _dense_gradient(
    gradient_TVp: Tensor,
    logits_TVp: Tensor,
    softmax: Softmax,
    logp_sum_T: Tensor,
    entropy_term: tuple[Tensor, Tensor] | None,
    request: Request,
) -> None:
    """Write -p_v * (sum of log-prob gradients + g_H (log p_v + H)) / temperature, and 0 in padding."""
    valid = request.shard.valid
    gradient_TVp[:, valid:] = 0
    logp_TV = torch.sub(logits_TVp[:, :valid], softmax.max_T[:, None], out=gradient_TVp[:, :valid])
    _divide(logp_TV, request.temperature)
    logp_TV.sub_(softmax.log_sum_T[:, None])
    if entropy_term is None:
        logp_TV.exp_().mul_((-logp_sum_T / request.temperature)[:, None])
        return
    entropy_T, entropy_grad_T = entropy_term
    p_TV = logp_TV.exp()
    logp_TV.clamp_(min=VANISHED).add_(entropy_T[:, None]).mul_(entropy_grad_T[:, None]).add_(logp_sum_T[:, None])
    logp_TV.mul_(p_TV).div_(-request.temperature)


def _divide(x_TV: Tensor, temperature: float) -> None:
    # At the usual temperature of 1 this would be one more pass over the vocabulary for nothing.
    if temperature != 1.0:
        x_TV.div_(temperature)


def _local_columns(ids_TN: Tensor, shard: VocabShard, columns: int) -> tuple[Tensor, Tensor]:
    """Return this rank's column of each global id (any column for another rank's ids), and a mask of its own."""
    local_TN = ids_TN - shard.start
    owned_TN = (local_TN >= 0) & (local_TN < shard.valid)
    return local_TN.clamp(0, columns - 1), owned_TN


def _top_of_shard(logits_TV: Tensor, topn: int) -> tuple[Tensor, Tensor]:
    """Return the best min(topn, V) logits and their columns, best first, ties to the lowest column.

    `topk` leaves the order of equal logits open, and with it which of several equal ones are left out; the
    rows where that matters, and only those, are sorted.
    """
    keep = min(topn, logits_TV.shape[1])
    logit_TN, column_TN = logits_TV.topk(min(keep + 1, logits_TV.shape[1]), dim=1)
    tied_T = (logit_TN[:, 1:] == logit_TN[:, :-1]).any(1)
    logit_TN, column_TN = logit_TN[:, :keep], column_TN[:, :keep].clone()
    rows = tied_T.nonzero()[:, 0]
    if rows.numel():
        order = logits_TV[rows].sort(dim=1, descending=True, stable=True).indices
        column_TN[rows] = order[:, :keep]
    return logit_TN, column_TN
