"""What the head is asked, what it answers, and what its parts hand each other."""

from __future__ import annotations

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
    """Which part of the vocabulary this rank's logits cover.

    `start`: global id of column 0. `valid`: how many columns, counted from the first, are vocabulary; those
    after are padding. `group`: the ranks that share the vocabulary, None when this rank holds all of it. `vocabulary`:
    the size of the whole, for all ranks of the group or for none; where it is None, a GPU waits to have it read back.

    Example, 10 tokens padded to 12 over two ranks: `VocabShard(0, 6, group)` and `VocabShard(6, 4, group)`.
    """

    start: int
    valid: int
    group: dist.ProcessGroup | None
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What to compute, for which shard."""

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
    """What backward needs of the whole vocabulary: log p = (z - max) / temperature - log_sum."""

    max_T: Tensor
    log_sum_T: Tensor
    entropy_T: Tensor | None
    topn_id_TN: Tensor | None

    def rows(self, begin: int, end: int) -> Softmax:
        """Those of the tokens from `begin` up to `end`."""
        entropy_T, topn_id_TN = (None if x is None else x[begin:end] for x in (self.entropy_T, self.topn_id_TN))
        return Softmax(self.max_T[begin:end], self.log_sum_T[begin:end], entropy_T, topn_id_TN)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """Gradients of the loss by the outputs, any strides; None where the loss does not use one."""

    logp_T: Tensor | None
    entropy_T: Tensor | None
    topn_TN: Tensor | None

    def rows(self, begin: int, end: int) -> Incoming:
        """Those of the tokens from `begin` up to `end`."""
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
    """The dtype of everything that is computed of these logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
