"""The head: from the logits or hidden states of a model's last layer to per-token results.

It has two forms (`policy.head`). `logits` lets Megatron compute all logits and then reads them. `chunked` has the
output layer pass its input on, whole over the sequence, and computes logits some tokens at a time, forward and again
backward (`ops/chunked_head`).

With context parallelism each rank computes its share of a micro-batch: its rows and the tokens that these predict.
Methods need whole sequences (means, sequence ratios, quantiles of a response), so the head's results go back to the
micro-batch's order on every rank before the loss. Every rank then computes the same loss, and backward gives each rank
the gradient of its own tokens: sums over ranks count every token once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megasharp.algos.base import DEFAULT_QUANTILE
from megasharp.common.records import MicroBatch
from megasharp.config.policy import HeadForm
from megasharp.learner.context_parallel import ContextCut, Exchange
from megasharp.learner.parallel import tensor_group
from megasharp.ops.chunked_head import chunked_token_head
from megasharp.ops.head import HeadOutput, VocabShard, token_head


@dataclass(frozen=True, slots=True, eq=False)
class TokenCut:
    """Assignment of T response tokens to ranks. Each rank sends `most` of them, padded.

    `own`: int64, this rank's tokens. `places_T`: int64 [T], each token's index in what all ranks have sent.
    """

    own: Tensor
    places_T: Tensor
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """One rank's L packed rows of a micro-batch, int64 unless said otherwise.

    `tokens_L` and `positions_L`: token ids and positions. `rows_T`: those of the rows that predict a response token,
    `targets_T`: the tokens that they predict. `cut` and `tokens`: how rows and tokens were cut, None where this rank
    has all. `experts`: where the engine sent the rows' tokens, uint8 or int16 [L, layers, experts per token]; None
    without routing replay. `is_real_L` (bool): the rows that are no padding.
    """

    tokens_L: Tensor
    positions_L: Tensor
    rows_T: Tensor
    targets_T: Tensor
    cut: ContextCut | None = None
    tokens: TokenCut | None = None
    experts: Tensor | None = None
    is_real_L: Tensor | None = None

    def own(self, values_T: Tensor) -> Tensor:
        """Select this rank's tokens from a micro-batch's per-token values [T, ...]."""
        return values_T if self.tokens is None else values_T.index_select(0, self.tokens.own)


def rank_share(micro: MicroBatch, rank: int = 0, size: int = 1) -> RankShare:
    """Return the share of rank number `rank` of `size`, on the CPU as `micro` is."""
    is_real_P = torch.arange(micro.rows) < micro.rows - micro.padding
    if size == 1:
        tensors = micro.tokens_P, micro.positions_P, micro.rows_T, micro.targets_T
        return RankShare(*tensors, experts=micro.experts_PLK, is_real_L=is_real_P)
    cut = ContextCut(rank, size, int(micro.tokens_P.numel()))
    held, rows, experts_PLK = cut.held(), cut.rows // size, micro.experts_PLK
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
        experts=None if experts_PLK is None else experts_PLK[held],
        is_real_L=is_real_P[held],
    )


def whole_head(head: HeadOutput, tokens: TokenCut | None, exchange: Exchange | None) -> HeadOutput:
    """Return the head's results for all T tokens in the micro-batch's order, equal on every rank.

    Backward gives each rank the gradient of its own tokens' results.
    """
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
    """State that forward leaves for backward."""

    tokens: TokenCut


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, own: Tensor, tokens: TokenCut, exchange: Exchange) -> Tensor:
        """Pad this rank's results `own` [own tokens, columns], gather all ranks' and return them as [T, columns]."""
        ctx.tokens = tokens
        padded = own.new_zeros(tokens.most, *own.shape[1:])
        padded[: own.shape[0]] = own
        return exchange.gather(padded).index_select(0, tokens.places_T)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the rows of the gradient [T, columns] that are this rank's tokens: [own tokens, columns]."""
        # Every rank has the gradient of the same loss: its own tokens' part is all of it.
        return gradients[0].index_select(0, ctx.tokens.own), None, None


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """Results wanted of the head besides log-probs.

    `entropy_gradient`: the entropy is differentiable. `topn`: number of candidates, or 0. `distinct_samples`: number of
    draws whose distinct next tokens are counted, or 0; at positions gated by the quantile `gate`.
    """

    entropy: bool
    entropy_gradient: bool
    topn: int
    distinct_samples: int = 0
    gate: float = DEFAULT_QUANTILE


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of a network's head.

    `temperature` divides logits before everything. `vocab`: the size of the real vocabulary, without padding.
    """

    temperature: float
    vocab: int
    form: HeadForm = "logits"


@dataclass(frozen=True, slots=True, eq=False)
class HeadResult:
    """Results of a rank's tokens of a micro-batch.

    `logits(rows_R)`: the logits [R, Vp] of some of these tokens, without gradient.
    """

    output: HeadOutput
    shard: VocabShard
    logits: Callable[[Tensor], Tensor]


def prepare(model: torch.nn.Module, form: HeadForm) -> None:
    """Make a chunk of the model end as this form of the head needs it. Call once, before its first pass."""
    gpt = _inner(model)
    if form == "chunked" and gpt.post_process:
        gpt.output_layer.forward = partial(_pass_on, gpt.output_layer)


def _pass_on(
    layer: ColumnParallelLinear, hidden_PBH: Tensor, weight: Tensor | None = None, runtime_gather_output: object = None
) -> tuple[Tensor, None]:
    """Return the layer's input, whole over the sequence, in place of its output.

    Backward sums the ranks' gradients, each of its own columns of the vocabulary: here, as the layer itself would.
    """
    whole = gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
    return whole(hidden_PBH, group=layer.tp_group), None


def evaluate(
    model: torch.nn.Module, output_BLX: Tensor, share: RankShare, settings: HeadSettings, request: HeadRequest
) -> HeadResult:
    """Compute the results of the tokens that this rank's rows predict.

    `output_BLX` is the output of a chunk of the last stage: [1, L, Vp] logits, of this rank's part of the vocabulary,
    or [1, L, H] hidden states, by the form.
    """
    x_TX = output_BLX[0].index_select(0, share.rows_T)
    asked: dict[str, Any] = {
        "temperature": settings.temperature,
        "entropy": request.entropy,
        "entropy_gradient": request.entropy_gradient,
        "topn": request.topn,
    }
    if settings.form == "logits":
        shard = _shard(x_TX.shape[1], settings.vocab)
        # They are a copy that nothing else keeps, so the gradient may take their place.
        head = token_head(x_TX, share.targets_T, shard, **asked, overwrite_logits=True)
        return HeadResult(head, shard, x_TX.detach().__getitem__)
    gpt = _inner(model)
    tied: bool = gpt.share_embeddings_and_output_weights
    weight_VpH: Tensor = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    # Megatron adds up the weight's gradient here; the kernel adds to it directly where it is in float32.
    buffer_VpH: Tensor | None = getattr(weight_VpH, "main_grad", None)
    if buffer_VpH is not None and buffer_VpH.dtype != torch.float32:
        buffer_VpH = None
    shard = _shard(weight_VpH.shape[0], settings.vocab)
    head = chunked_token_head(x_TX, weight_VpH, share.targets_T, shard, **asked, weight_grad_VpH=buffer_VpH)
    hidden_TH, fixed_VpH = x_TX.detach(), weight_VpH.detach()
    return HeadResult(head, shard, lambda rows_R: hidden_TH[rows_R] @ fixed_VpH.t())


def _inner(model: torch.nn.Module) -> GPTModel:
    """Return the model inside Megatron's wrappers."""
    while not isinstance(model, GPTModel):
        model = model.get_submodule("module")
    return model


def _shard(columns: int, vocab: int) -> VocabShard:
    start = parallel_state.get_tensor_model_parallel_rank() * columns
    return VocabShard(start, max(0, min(columns, vocab - start)), tensor_group(), vocab)
