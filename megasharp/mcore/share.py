"""What one rank computes of a micro-batch: all of it, or with context parallel its rows and the tokens these predict.

Methods need whole sequences (means, sequence ratios, quantiles of a response), so the head's results go back to the
micro-batch's order on every rank before the loss. Every rank computes the same loss then, and backward hands each the
gradient of its own tokens: sums over ranks count every token once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.mcore.context import ContextCut, Exchange
from megasharp.ops.head import HeadOutput
from megasharp.types import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenCut:
    """Which of T response tokens are whose. Each rank sends `most` of them, padded.

    `own`: int64, this rank's tokens. `places_T`: int64 [T], where each token lies in what all ranks have sent.
    """

    own: Tensor
    places_T: Tensor
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """L rows: `tokens_L`, `positions_L`; the predicting ones of them and what they predict: `rows_T`, `targets_T`.

    `cut` and `tokens` say how it was cut, None where this rank has all.
    """

    tokens_L: Tensor
    positions_L: Tensor
    rows_T: Tensor
    targets_T: Tensor
    cut: ContextCut | None = None
    tokens: TokenCut | None = None

    def own(self, values_T: Tensor) -> Tensor:
        """Of a micro-batch's per-token values those of this rank's tokens."""
        return values_T if self.tokens is None else values_T.index_select(0, self.tokens.own)


def rank_share(micro: MicroBatch, rank: int = 0, size: int = 1) -> RankShare:
    """The share of rank number `rank` of `size`; on the CPU, as `micro` is."""
    if size == 1:
        return RankShare(micro.tokens_P, micro.positions_P, micro.rows_T, micro.targets_T)
    cut = ContextCut(rank, size, int(micro.tokens_P.numel()))
    held, rows = cut.held(), cut.rows // size
    place_T = cut.places()[micro.rows_T]
    owner_T = place_T // rows
    own = (owner_T == rank).nonzero()[:, 0]
    counts = torch.bincount(owner_T, minlength=size)
    most = int(counts.max())
    # Tokens by owner, each owner's in the micro-batch's order.
    order = owner_T.argsort(stable=True)
    within = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[owner_T[order]]
    places_T = torch.empty_like(order)
    places_T[order] = owner_T[order] * most + within
    return RankShare(
        tokens_L=micro.tokens_P[held],
        positions_L=micro.positions_P[held],
        rows_T=place_T[own] - rank * rows,
        targets_T=micro.targets_T[own],
        cut=cut,
        tokens=TokenCut(own, places_T, most),
    )


def whole_head(head: HeadOutput, tokens: TokenCut | None, exchange: Exchange | None) -> HeadOutput:
    """The head's results for all T tokens in the micro-batch's order, equal on every rank."""
    if tokens is None or exchange is None or tokens.most == 0:
        return head
    candidates = [] if head.topn_logp_TN is None or head.topn_id_TN is None else [head.topn_logp_TN, head.topn_id_TN]
    others = [x[:, None] for x in (head.logp_T, head.normaliser_T, head.entropy_T, head.is_top1_T) if x is not None]
    parts = [*others, *candidates]
    # Token ids are exact in float32 up to 2**24, beyond every vocabulary.
    joined = torch.cat([part.to(head.logp_T.dtype) for part in parts], dim=1)
    whole: Tensor = _Whole.apply(joined, tokens, exchange)  # type: ignore[no-untyped-call]
    columns = list(torch.split(whole, [part.shape[1] for part in parts], dim=1))
    columns = [c if part.requires_grad else c.detach() for c, part in zip(columns, parts, strict=True)]
    logp, normaliser, *rest = (column[:, 0] for column in columns[: len(others)])
    named = iter(rest)
    return HeadOutput(
        logp_T=logp,
        entropy_T=None if head.entropy_T is None else next(named),
        topn_logp_TN=columns[-2] if candidates else None,
        topn_id_TN=columns[-1].long() if candidates else None,
        is_top1_T=None if head.is_top1_T is None else next(named),
        normaliser_T=normaliser,
    )


class _Context(torch.autograd.function.FunctionCtx):
    """What backward needs."""

    tokens: TokenCut


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, own: Tensor, tokens: TokenCut, exchange: Exchange) -> Tensor:
        ctx.tokens = tokens
        padded = own.new_zeros(tokens.most, *own.shape[1:])
        padded[: own.shape[0]] = own
        return exchange.gather(padded).index_select(0, tokens.places_T)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Every rank has the gradient of the same loss: its own tokens' part is all of it.
        return gradients[0].index_select(0, ctx.tokens.own), None, None
