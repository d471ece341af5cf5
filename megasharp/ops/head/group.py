"""From every shard's part to the whole vocabulary's: two all-reduces, and one all-gather for the candidates.

The parts of one shard's splits are joined by the same arithmetic (`joined`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.ops.head.records import NO_ID, HeadOutput, Request, ShardPart, Softmax, VocabShard

# exp() of this is exactly 0 in every dtype, and unlike -inf it may be multiplied by that 0.
VANISHED = -1.0e4


class TargetCheck:
    """Whether all targets are in the vocabulary, found while the device works on.

    Reading a result off a GPU waits for all that was launched before it, so the check is launched first and read last.
    """

    def __init__(self, target_T: Tensor) -> None:
        self._target_T = target_T
        self._ready: torch.cuda.Event | None = None
        if target_T.numel():
            self._range = torch.stack(target_T.aminmax())
            if target_T.is_cuda:
                pinned = torch.empty(2, dtype=target_T.dtype, pin_memory=True)
                self._range = pinned.copy_(self._range, non_blocking=True)
                self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._ready.record()

    def finish(self, vocabulary: int) -> None:
        """Raise ValueError for the first target outside of it."""
        target_T = self._target_T
        if target_T.numel() == 0:
            return
        if self._ready is not None:
            self._ready.synchronize()
        low, high = self._range.tolist()
        if low < 0 or high >= vocabulary:
            index = int(((target_T < 0) | (target_T >= vocabulary)).nonzero()[0])
            raise ValueError(
                f"target_T[{index}] = {int(target_T[index])} is outside the vocabulary of {vocabulary} tokens"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The whole vocabulary's outputs, without gradient, and what backward needs of them."""

    output: HeadOutput
    softmax: Softmax


def join_over_group(part: ShardPart, target_T: Tensor, check: TargetCheck, request: Request) -> Joined:
    """Every rank's part, of the same tokens, as the whole vocabulary's outputs; equal on all ranks of the group.

    Raises ValueError, on all ranks alike, for a target or a `topn` beyond the vocabulary.
    """
    shard, temperature = request.shard, request.temperature
    max_T, vocabulary = _global_max(part.max_T, shard)
    if request.topn > vocabulary:
        raise ValueError(f"topn = {request.topn} exceeds the vocabulary of {vocabulary}")
    check.finish(vocabulary)
    target_logp_T, log_sum_T, entropy_T = _sums(part, max_T, target_T, request)
    topn_logp_TN = topn_id_TN = is_top1_T = None
    if request.topn:
        logit_TN, topn_id_TN = _candidates(part, request.topn, shard.group, vocabulary)
        topn_logp_TN = (logit_TN.to(max_T.dtype) - max_T[:, None]) / temperature - log_sum_T[:, None]
        is_top1_T = (topn_id_TN[:, 0] == target_T).to(max_T.dtype)
    normaliser_T = max_T / temperature + log_sum_T
    output = HeadOutput(target_logp_T, entropy_T, topn_logp_TN, topn_id_TN, is_top1_T, normaliser_T)
    return Joined(output, Softmax(max_T, log_sum_T, entropy_T, topn_id_TN))


def _global_max(max_T: Tensor, shard: VocabShard) -> tuple[Tensor, int]:
    """Each token's largest logit over the vocabulary, and the size of the vocabulary, in one all-reduce."""
    # A shard of padding alone begins behind the last id.
    end = shard.start + shard.valid if shard.valid else 0
    if shard.group is None:
        return max_T, end
    if shard.vocabulary is not None:
        # No tokens on one rank means none on any rank of the group.
        if max_T.numel():
            max_T = max_T.clone()
            dist.all_reduce(max_T, dist.ReduceOp.MAX, shard.group)
        return max_T, shard.vocabulary
    # float64 holds both a float32 logit and a token id exactly.
    packed = torch.cat([max_T.double(), max_T.new_full((1,), end, dtype=torch.float64)])
    dist.all_reduce(packed, dist.ReduceOp.MAX, shard.group)
    return packed[:-1].to(max_T.dtype), int(packed[-1])


def _sums(part: ShardPart, max_T: Tensor, id_T: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor | None]:
    """The target's log-prob, the log of the sum of exponentials, and the entropy, in one all-reduce.

    The maximum is subtracted before the temperature divides: the difference of two large logits is exact,
    their quotients are not.
    """
    group = request.shard.group
    target_T = (part.target_T - max_T) / request.temperature
    sum_T, weighted_T = part.sum_T, part.weighted_T
    # No tokens on one rank means none on any rank of the group, so all of them skip together.
    if group is not None and max_T.numel():
        sum_T, weighted_T = rescaled(part, max_T, request.temperature)
        target_T = target_T.masked_fill(~owned(id_T, request.shard), 0)
        total = torch.stack([x for x in (sum_T, target_T, weighted_T) if x is not None])
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        sum_T, target_T = total[0], total[1]
        weighted_T = None if weighted_T is None else total[2]
    log_sum_T = sum_T.log()
    entropy_T = None if weighted_T is None else log_sum_T - weighted_T / sum_T
    return target_T - log_sum_T, log_sum_T, entropy_T


def owned(id_T: Tensor, shard: VocabShard) -> Tensor:
    """Which of these global ids are the shard's own."""
    return (id_T >= shard.start) & (id_T < shard.start + shard.valid)


def rescaled(part: ShardPart, max_T: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """The part's sums as they are with a larger maximum: exp(z - max) = exp(z - own) exp(own - max)."""
    shift_T = ((part.max_T - max_T) / temperature).clamp(min=VANISHED)
    factor_T = shift_T.exp()
    weighted_T = None if part.weighted_T is None else (part.weighted_T + part.sum_T * shift_T) * factor_T
    return part.sum_T * factor_T, weighted_T


def _candidates(part: ShardPart, topn: int, group: dist.ProcessGroup | None, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Raw logits and global ids of the vocabulary's `topn` best tokens, best first, ties to the lowest id."""
    assert part.topn_logit_TN is not None and part.topn_id_TN is not None
    logit_TN, id_TN = part.topn_logit_TN, part.topn_id_TN
    if group is not None:
        logit_TN, id_TN = best(*_gather(logit_TN, id_TN, topn, group), topn)
    # Where logits are no numbers a candidate may be missing; its id must still be one.
    return logit_TN, id_TN.clamp(max=vocabulary - 1)


def best(logit_TK: Tensor, id_TK: Tensor, topn: int) -> tuple[Tensor, Tensor]:
    """The first `topn` of K candidates: largest logit first, ties to the lowest id."""
    id_TK, by_id_TK = id_TK.sort(dim=1)
    logit_TK, by_logit_TK = logit_TK.gather(1, by_id_TK).sort(dim=1, descending=True, stable=True)
    return logit_TK[:, :topn], id_TK.gather(1, by_logit_TK)[:, :topn]


def _gather(logit_TN: Tensor, id_TN: Tensor, topn: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The candidates of all ranks side by side, [T, topn * ranks], in one all-gather."""
    missing = topn - logit_TN.shape[1]
    packed = torch.stack(
        [
            torch.nn.functional.pad(logit_TN.double(), (0, missing), value=-math.inf),
            torch.nn.functional.pad(id_TN.double(), (0, missing), value=NO_ID),
        ]
    )
    parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    if packed.numel():
        dist.all_gather(parts, packed, group)
    logit_TK, id_TK = torch.cat(parts, dim=2)
    return logit_TK, id_TK.long()
