"""What the policy says about each token: log-prob, entropy, top-N, from vocabulary-parallel logits.

One autograd function with one dense pass backward. With z the logits of a token, T the temperature, p =
softmax(z / T) and H = -sum_v p_v log p_v:

    d log p_t / d z_v = (1[v = t] - p_v) / T            d H / d z_v = -p_v (log p_v + H) / T

so for incoming gradients g (target's log-prob), g_n (top-N log-probs) and g_H (entropy)

    dz_v = ( -p_v * (g + sum_n g_n + g_H (log p_v + H)) + g 1[v = t] + sum_n g_n 1[v = id_n] ) / T.

Only the logits and a few [T] statistics are kept for backward. This is the reference in plain torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# exp() of this is exactly 0 in every dtype, and unlike -inf it may be multiplied by that 0.
_VANISHED = -1.0e4
# Larger than any token id and exact in float64, so a shard's missing candidates lose every tie.
_NO_ID = 2**53 - 1


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutput:
    """Per-token results, equal on every rank of the group; float32, or float64 when the logits are.

    `logp_T`: log-prob of the target. `entropy_T`: in nats. `topn_logp_TN`, `topn_id_TN` (int64 global ids):
    the N most probable tokens, best first, ties to the lowest id. `is_top1_T`: 1.0 where the target is the
    first of them. `normaliser_T`: log sum_v exp(z_v / temperature), so that a logit's log-prob is z / temperature minus
    it; without gradient. A field that was not asked for is None; `is_top1_T` comes with `topn >= 1`.
    """

    logp_T: Tensor
    entropy_T: Tensor | None
    topn_logp_TN: Tensor | None
    topn_id_TN: Tensor | None
    is_top1_T: Tensor | None
    normaliser_T: Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which part of the vocabulary this rank's logits cover.

    `start`: global id of column 0. `valid`: how many columns, counted from the first, are vocabulary; those
    after are padding. `group`: the ranks that share the vocabulary, None when this rank holds all of it.

    Example, 10 tokens padded to 12 over two ranks: `VocabShard(0, 6, group)` and `VocabShard(6, 4, group)`.
    """

    start: int
    valid: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class _Request:
    """What to compute, for which shard."""

    shard: VocabShard
    temperature: float
    entropy: bool
    entropy_gradient: bool
    topn: int


@dataclass(frozen=True, slots=True, eq=False)
class _Statistics:
    """Softmax statistics over the whole vocabulary: log p = (z - max) / temperature - log_sum."""

    max_T: Tensor
    log_sum_T: Tensor
    target_logp_T: Tensor
    entropy_T: Tensor | None

    def logp(self, logit_TN: Tensor, temperature: float) -> Tensor:
        """Log-probs of the given raw logits, [T, N]."""
        return (logit_TN - self.max_T[:, None]) / temperature - self.log_sum_T[:, None]


_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]


class _HeadContext(FunctionCtx):
    """What forward leaves for backward."""

    request: _Request
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def token_head(
    logits_TVp: Tensor,
    target_T: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    topn: int = 0,
) -> HeadOutput:
    """Log-prob of each target under softmax(logits / temperature) and, where asked for, entropy and top-N.

    `logits_TVp`: [T, Vp] float32, bfloat16, float16 or float64, any strides; padding columns have no
    effect and get a gradient of exactly 0. `target_T`: int64 [T] global ids, the same on every rank of the
    group, as are the arguments after `shard`. Statistics are float32 (float64 for float64 logits).

    Gradients flow through `logp_T`, `topn_logp_TN` and, with `entropy_gradient`, `entropy_T`. Every rank must
    compute the same loss from its (equal) results; each then gets the gradient of its own columns, without
    communication. A group costs two all-reduces forward, and one all-gather more with `topn`.

    Raises ValueError for a target outside the vocabulary, `topn` negative or beyond the vocabulary, a
    temperature that is not positive and finite, and `entropy_gradient` without `entropy`.
    """
    request = _Request(shard, temperature, entropy, entropy_gradient, topn)
    _check_request(request)
    assert logits_TVp.dim() == 2 and target_T.shape == logits_TVp.shape[:1], "logits [T, Vp], target [T]"
    assert 0 <= shard.valid <= logits_TVp.shape[1], "a shard has no more vocabulary than columns"
    assert shard.group is not None or shard.start == 0, "without a group the shard is the vocabulary"
    outputs = cast(_Outputs, _TokenHead.apply(logits_TVp, target_T, request))  # type: ignore[no-untyped-call]
    return HeadOutput(*outputs)


def _check_request(request: _Request) -> None:
    if not (request.temperature > 0 and math.isfinite(request.temperature)):
        raise ValueError(f"temperature must be positive and finite, got {request.temperature}")
    if request.topn < 0:
        raise ValueError(f"topn must not be negative, got {request.topn}")
    if request.entropy_gradient and not request.entropy:
        raise ValueError("entropy_gradient=True needs entropy=True")


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _HeadContext, logits_TVp: Tensor, target_T: Tensor, request: _Request) -> _Outputs:
        shard = request.shard
        max_T, vocabulary = _global_max(logits_TVp, shard)
        if request.topn > vocabulary:
            raise ValueError(f"topn = {request.topn} exceeds the vocabulary of {vocabulary}")
        _check_targets(target_T, vocabulary)
        statistics = _statistics(logits_TVp, target_T, max_T, request)
        topn_logp_TN = topn_id_TN = is_top1_T = None
        if request.topn:
            topn_logit_TN, topn_id_TN = _top_candidates(logits_TVp, shard, request.topn)
            topn_logp_TN = statistics.logp(topn_logit_TN.to(max_T.dtype), request.temperature)
            is_top1_T = (topn_id_TN[:, 0] == target_T).to(max_T.dtype)
        entropy_T = statistics.entropy_T
        _keep(ctx, request, (logits_TVp, target_T, max_T, statistics.log_sum_T, entropy_T, topn_id_TN))
        normaliser_T = max_T / request.temperature + statistics.log_sum_T
        constants = [topn_id_TN, is_top1_T, normaliser_T, None if request.entropy_gradient else entropy_T]
        ctx.mark_non_differentiable(*(x for x in constants if x is not None))
        return statistics.target_logp_T, entropy_T, topn_logp_TN, topn_id_TN, is_top1_T, normaliser_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _HeadContext,
        logp_grad_T: Tensor | None,
        entropy_grad_T: Tensor | None,
        topn_grad_TN: Tensor | None,
        *_: None,
    ) -> tuple[Tensor | None, None, None]:
        logits_TVp, target_T, max_T, log_sum_T, entropy_T, topn_id_TN = ctx.saved_tensors
        request = ctx.request
        target_grad_TN = None if logp_grad_T is None else logp_grad_T[:, None]
        sparse = [*_present(target_T[:, None], target_grad_TN), *_present(topn_id_TN, topn_grad_TN)]
        logp_sum_T = sum((grad_TN.sum(1) for _, grad_TN in sparse), start=torch.zeros_like(max_T))
        entropy_term = next(iter(_present(entropy_T, entropy_grad_T)), None)
        gradient_TVp = _dense_gradient(logits_TVp, max_T, log_sum_T, logp_sum_T, entropy_term, request)
        for ids_TN, grad_TN in sparse:
            column_TN, owned_TN = _local_columns(ids_TN, request.shard, gradient_TVp.shape[1])
            added_TN = (grad_TN / request.temperature).masked_fill(~owned_TN, 0)
            gradient_TVp.scatter_add_(1, column_TN, added_TN)
        return gradient_TVp.to(logits_TVp.dtype), None, None


def _keep(ctx: _HeadContext, request: _Request, tensors: tuple[Tensor | None, ...]) -> None:
    ctx.request = request
    ctx.save_for_backward(*cast(tuple[Tensor, ...], tensors))
    # None instead of a dense zero tensor for every output that the loss did not use.
    ctx.set_materialize_grads(False)


def _present(value: Tensor | None, gradient: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """The pair, when the output exists and the loss used it; else nothing."""
    return [] if value is None or gradient is None else [(value, gradient)]


def _dense_gradient(
    logits_TVp: Tensor,
    max_T: Tensor,
    log_sum_T: Tensor,
    logp_sum_T: Tensor,
    entropy_term: tuple[Tensor, Tensor] | None,
    request: _Request,
) -> Tensor:
    """-p_v * (sum of log-prob gradients + g_H (log p_v + H)) / temperature; 0 in padding columns."""
    valid = request.shard.valid
    gradient_TVp = torch.empty(logits_TVp.shape, dtype=max_T.dtype, device=logits_TVp.device)
    gradient_TVp[:, valid:] = 0
    logp_TV = torch.sub(logits_TVp[:, :valid], max_T[:, None], out=gradient_TVp[:, :valid])
    _divide(logp_TV, request.temperature)
    logp_TV.sub_(log_sum_T[:, None])
    if entropy_term is None:
        logp_TV.exp_().mul_((-logp_sum_T / request.temperature)[:, None])
        return gradient_TVp
    entropy_T, entropy_grad_T = entropy_term
    p_TV = logp_TV.exp()
    logp_TV.clamp_(min=_VANISHED).add_(entropy_T[:, None]).mul_(entropy_grad_T[:, None]).add_(logp_sum_T[:, None])
    logp_TV.mul_(p_TV).div_(-request.temperature)
    return gradient_TVp


def _divide(x_TV: Tensor, temperature: float) -> None:
    # At the usual temperature of 1 this would be one more pass over the vocabulary for nothing.
    if temperature != 1.0:
        x_TV.div_(temperature)


def _global_max(logits_TVp: Tensor, shard: VocabShard) -> tuple[Tensor, int]:
    """Each token's largest logit over the vocabulary, and the size of the vocabulary, in one all-reduce."""
    dtype = torch.float64 if logits_TVp.dtype == torch.float64 else torch.float32
    end = shard.start + shard.valid
    if shard.valid:
        max_T = logits_TVp[:, : shard.valid].amax(1).to(dtype)
    else:
        max_T = logits_TVp.new_full(logits_TVp.shape[:1], -math.inf, dtype=dtype)
    if shard.group is None:
        return max_T, end
    # float64 holds both a float32 logit and a token id exactly.
    packed = torch.cat([max_T.double(), max_T.new_full((1,), end, dtype=torch.float64)])
    dist.all_reduce(packed, dist.ReduceOp.MAX, shard.group)
    return packed[:-1].to(dtype), int(packed[-1])


def _check_targets(target_T: Tensor, vocabulary: int) -> None:
    if target_T.numel() == 0:
        return
    low, high = torch.stack(target_T.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        index = int(((target_T < 0) | (target_T >= vocabulary)).nonzero()[0])
        raise ValueError(f"target_T[{index}] = {int(target_T[index])} is outside the vocabulary of {vocabulary} tokens")


def _statistics(logits_TVp: Tensor, target_T: Tensor, max_T: Tensor, request: _Request) -> _Statistics:
    """Everything that needs a sum over the vocabulary, in one all-reduce.

    The maximum is subtracted before the temperature divides: the difference of two large logits is exact,
    their quotients are not.
    """
    shard = request.shard
    column_T1, owned_T1 = _local_columns(target_T[:, None], shard, logits_TVp.shape[1])
    shifted_T1 = (logits_TVp.gather(1, column_T1) - max_T[:, None]) / request.temperature
    shifted_TV = logits_TVp[:, : shard.valid] - max_T[:, None]
    _divide(shifted_TV, request.temperature)
    exp_TV = shifted_TV.exp() if request.entropy else shifted_TV.exp_()
    sums = [exp_TV.sum(1), shifted_T1.masked_fill(~owned_T1, 0)[:, 0]]
    if request.entropy:
        sums.append(shifted_TV.clamp_(min=_VANISHED).mul_(exp_TV).sum(1))
    total = _all_reduce_sum(torch.stack(sums), shard.group)
    log_sum_T = total[0].log()
    entropy_T = log_sum_T - total[2] / total[0] if request.entropy else None
    return _Statistics(max_T, log_sum_T, total[1] - log_sum_T, entropy_T)


def _all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # No tokens on one rank means none on any rank of the group, so all of them skip together.
    if group is not None and x.numel():
        dist.all_reduce(x, dist.ReduceOp.SUM, group)
    return x


def _local_columns(ids_TN: Tensor, shard: VocabShard, columns: int) -> tuple[Tensor, Tensor]:
    """This rank's column of each global id (any column for another rank's ids), and which are its own."""
    local_TN = ids_TN - shard.start
    owned_TN = (local_TN >= 0) & (local_TN < shard.valid)
    return local_TN.clamp(0, columns - 1), owned_TN


def _top_candidates(logits_TVp: Tensor, shard: VocabShard, topn: int) -> tuple[Tensor, Tensor]:
    """Raw logits and global ids of the vocabulary's `topn` best tokens, best first, ties to the lowest id."""
    logit_TN, column_TN = _top_of_shard(logits_TVp[:, : shard.valid], topn)
    id_TN = column_TN + shard.start
    if shard.group is None:
        return logit_TN, id_TN
    logit_TK, id_TK = _gather_candidates(logit_TN, id_TN, topn, shard.group)
    id_TK, by_id_TK = id_TK.sort(dim=1)
    logit_TK, by_logit_TK = logit_TK.gather(1, by_id_TK).sort(dim=1, descending=True, stable=True)
    return logit_TK[:, :topn], id_TK.gather(1, by_logit_TK)[:, :topn]


def _gather_candidates(logit_TN: Tensor, id_TN: Tensor, topn: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The candidates of all ranks side by side, [T, topn * ranks], in one all-gather."""
    missing = topn - logit_TN.shape[1]
    packed = torch.stack(
        [
            torch.nn.functional.pad(logit_TN.double(), (0, missing), value=-math.inf),
            torch.nn.functional.pad(id_TN.double(), (0, missing), value=_NO_ID),
        ]
    )
    parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    if packed.numel():
        dist.all_gather(parts, packed, group)
    logit_TK, id_TK = torch.cat(parts, dim=2)
    return logit_TK, id_TK.long()


def _top_of_shard(logits_TV: Tensor, topn: int) -> tuple[Tensor, Tensor]:
    """The best min(topn, V) logits and their columns, best first, ties to the lowest column.

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
