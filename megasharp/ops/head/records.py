"""The head's records, and the arithmetic that joins the parts of a vocabulary over the ranks that share it.

`Request` goes in and `HeadOutput` comes out. In between, one read of a shard's logits leaves a `ShardPart`, a few
numbers a token. `join_over_group` makes the whole vocabulary's outputs of all ranks' parts: two all-reduces, and one
all-gather for the candidates. `rescaled` and `best` also join the splits of one shard (`kernel_launch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
    """The part of the vocabulary that this rank's logits cover.

    `start`: global id of column 0. `valid`: the number of columns, counted from the first, that are vocabulary; those
    after are padding. `group`: the ranks that share the vocabulary, None when this rank holds all of it. `vocabulary`:
    the size of the whole, set on all ranks of the group or on none; where it is None, every call asks the group for it
    and waits for the GPU.

    Example, 10 tokens padded to 12 over two ranks: `VocabShard(0, 6, group)` and `VocabShard(6, 4, group)`.
    """

    start: int
    valid: int
    group: dist.ProcessGroup | None
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """The shard, and the outputs wanted of it (see `token_head`)."""

    shard: VocabShard
    temperature: float
    entropy: bool
    entropy_gradient: bool
    topn: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """One read of a shard's logits, reduced to a few numbers a token. Float32, or float64 for float64 logits.

    `max_T`: the largest logit, -inf for a shard without vocabulary. `sum_T`: sum_v exp((z_v - max) / temperature), and
    `weighted_T` the same sum with each term times (z_v - max) / temperature; None where no entropy was asked for.
    `target_T`: the target's raw logit, 0 where another shard has it. `topn_logit_TN`, `topn_id_TN`: raw logits and
    global ids of the best min(topn, valid) columns or more, best first, ties to the lowest id; columns that the shard
    does not have are -inf with an id of `NO_ID`. None where no candidates were asked for.
    """

    max_T: Tensor
    sum_T: Tensor
    weighted_T: Tensor | None
    target_T: Tensor
    topn_logit_TN: Tensor | None
    topn_id_TN: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The whole vocabulary's statistics for backward: log p = (z - max) / temperature - log_sum."""

    max_T: Tensor
    log_sum_T: Tensor
    entropy_T: Tensor | None
    topn_id_TN: Tensor | None

    def rows(self, begin: int, end: int) -> Softmax:
        """Return those of the tokens from `begin` up to `end`."""
        entropy_T, topn_id_TN = (None if x is None else x[begin:end] for x in (self.entropy_T, self.topn_id_TN))
        return Softmax(self.max_T[begin:end], self.log_sum_T[begin:end], entropy_T, topn_id_TN)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """Gradients of the loss by the outputs, any strides; None where the loss does not use one."""

    logp_T: Tensor | None
    entropy_T: Tensor | None
    topn_TN: Tensor | None

    def rows(self, begin: int, end: int) -> Incoming:
        """Return those of the tokens from `begin` up to `end`."""
        return Incoming(*(None if g is None else g[begin:end] for g in (self.logp_T, self.entropy_T, self.topn_TN)))


# Larger than any token id and exact in float64, so a shard's missing candidates lose every tie.
NO_ID = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One implementation of the two passes over a shard's logits.

    `part(logits_TVp, target_T, request)` reads them. `gradient(out_TVp, logits_TVp, target_T, softmax, incoming,
    request)` writes the loss's gradient by them to `out_TVp`, all of it, which may be `logits_TVp` itself.
    """

    part: Callable[[Tensor, Tensor, Request], ShardPart]
    gradient: Callable[[Tensor, Tensor, Tensor, Softmax, Incoming, Request], None]


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of everything that is computed of these logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


# exp() of this is exactly 0 in every dtype, and unlike -inf it may be multiplied by that 0.
VANISHED = -1.0e4


class TargetCheck:
    """The check that all targets are in the vocabulary, made while the device works on.

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
    """Make the whole vocabulary's outputs of every rank's part; equal on all ranks of the group.

    All ranks have the same tokens, `target_T` int64 [T] global ids. Raises ValueError, on all ranks alike, for a target
    or a `topn` beyond the vocabulary.
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
    """Return each token's largest logit over the vocabulary, and the vocabulary's size, by one all-reduce."""
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
    """Return the target's log-prob, the log of the sum of exponentials, and the entropy, by one all-reduce."""
    group = request.shard.group
    # Subtracted before it is divided: the difference of two large logits is exact, their quotients are not.
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
    """Mark the global ids that are the shard's own: bool, of the same shape."""
    return (id_T >= shard.start) & (id_T < shard.start + shard.valid)


def rescaled(part: ShardPart, max_T: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """Return the part's two sums relative to a larger maximum: exp(z - max) = exp(z - own) exp(own - max).

    `max_T` broadcasts against the part's fields; `weighted_T` is None where the part has none.
    """
    shift_T = ((part.max_T - max_T) / temperature).clamp(min=VANISHED)
    factor_T = shift_T.exp()
    weighted_T = None if part.weighted_T is None else (part.weighted_T + part.sum_T * shift_T) * factor_T
    return part.sum_T * factor_T, weighted_T


def _candidates(part: ShardPart, topn: int, group: dist.ProcessGroup | None, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return raw logits and global ids of the vocabulary's `topn` best tokens, by one all-gather."""
    assert part.topn_logit_TN is not None and part.topn_id_TN is not None
    logit_TN, id_TN = part.topn_logit_TN, part.topn_id_TN
    if group is not None:
        # float64 holds both exactly, so one collective does. A shard of fewer columns than `topn` is filled up.
        missing = (0, topn - logit_TN.shape[1])
        logits = torch.nn.functional.pad(logit_TN.double(), missing, value=-math.inf)
        packed = torch.stack([logits, torch.nn.functional.pad(id_TN.double(), missing, value=NO_ID)])
        parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        if packed.numel():
            dist.all_gather(parts, packed, group)
        logit_TK, id_TK = torch.cat(parts, dim=2)
        logit_TN, id_TN = best(logit_TK, id_TK.long(), topn)
    # Where logits are no numbers a candidate may be missing; its id must still be one.
    return logit_TN, id_TN.clamp(max=vocabulary - 1)


def best(logit_TK: Tensor, id_TK: Tensor, topn: int) -> tuple[Tensor, Tensor]:
    """Return the first `topn` of K candidates: largest logit first, ties to the lowest id; ids are int64."""
    id_TK, by_id_TK = id_TK.sort(dim=1)
    logit_TK, by_logit_TK = logit_TK.gather(1, by_id_TK).sort(dim=1, descending=True, stable=True)
    return logit_TK[:, :topn], id_TK.gather(1, by_logit_TK)[:, :topn]
