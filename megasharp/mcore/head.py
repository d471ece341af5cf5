"""What follows a model's last layer: from its logits, or its hidden states, to per-token results.

`logits` lets Megatron compute all logits and then reads them. `chunked` has the output layer hand its input on, whole
over the sequence, and computes logits some tokens at a time, forward and again backward (`ops/chunked_head`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megasharp.algos.gate import DEFAULT_QUANTILE
from megasharp.mcore.parallel import tensor_group
from megasharp.mcore.share import RankShare
from megasharp.ops.chunked_head import chunked_token_head
from megasharp.ops.head import HeadOutput, VocabShard, token_head

HeadForm = Literal["logits", "chunked"]


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """What the head computes besides log-probs.

    `distinct_samples`: draws to count distinct next tokens of, or 0; at positions gated by the quantile `gate`.
    """

    entropy: bool
    entropy_gradient: bool
    topn: int
    distinct_samples: int = 0
    gate: float = DEFAULT_QUANTILE


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The sampling temperature (applied to logits before everything), the real vocabulary size, and the form."""

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
    """Have a chunk of the model end as this form of the head needs it; once, before its first pass."""
    gpt = _inner(model)
    if form == "chunked" and gpt.post_process:
        gpt.output_layer.forward = partial(_hand_on, gpt.output_layer)


def _hand_on(
    layer: ColumnParallelLinear, hidden_PBH: Tensor, weight: Tensor | None = None, runtime_gather_output: object = None
) -> tuple[Tensor, None]:
    """The layer's input, whole over the sequence, in place of its output.

    Backward sums the ranks' gradients, each of its own columns of the vocabulary: here, as the layer itself would.
    """
    whole = gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
    return whole(hidden_PBH, group=layer.tp_group), None


def evaluate(
    model: torch.nn.Module, output_BLX: Tensor, share: RankShare, settings: HeadSettings, request: HeadRequest
) -> HeadResult:
    """Results, for the tokens that this rank's rows predict, of what a chunk of the last stage gave.

    That is [1, L, Vp] logits, or [1, L, H] hidden states.
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
        # They are a copy that nothing else keeps.
        head = token_head(x_TX, share.targets_T, shard, **asked, overwrite_logits=True)
        return HeadResult(head, shard, x_TX.detach().__getitem__)
    weight_VpH = _output_weight(_inner(model))
    shard = _shard(weight_VpH.shape[0], settings.vocab)
    head = chunked_token_head(
        x_TX, weight_VpH, share.targets_T, shard, **asked, weight_grad_VpH=_gradient_buffer(weight_VpH)
    )
    hidden_TH, fixed_VpH = x_TX.detach(), weight_VpH.detach()
    return HeadResult(head, shard, lambda rows_R: hidden_TH[rows_R] @ fixed_VpH.t())


def _inner(model: torch.nn.Module) -> GPTModel:
    """The model inside Megatron's wrappers."""
    while not isinstance(model, GPTModel):
        model = model.get_submodule("module")
    return model


def _output_weight(gpt: GPTModel) -> Tensor:
    tied: bool = gpt.share_embeddings_and_output_weights
    weight: Tensor = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    return weight


def _gradient_buffer(weight_VpH: Tensor) -> Tensor | None:
    """Where Megatron adds up this weight's gradient, if that is in float32; else None."""
    buffer: Tensor | None = getattr(weight_VpH, "main_grad", None)
    return buffer if buffer is not None and buffer.dtype == torch.float32 else None


def _shard(columns: int, vocab: int) -> VocabShard:
    start = parallel_state.get_tensor_model_parallel_rank() * columns
    return VocabShard(start, max(0, min(columns, vocab - start)), tensor_group(), vocab)
