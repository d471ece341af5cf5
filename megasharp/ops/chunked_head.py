"""The head from hidden states, some tokens at a time, and the float32 matrix product that serves it on a CPU.

`chunked_token_head` never has a whole sequence's logits (`ops/head` has the formulas). Forward computes a chunk's
logits, reads them once and drops them; the parts of all chunks are joined over the group together, so the collectives
are those of the head with logits. Backward computes each chunk's logits again, overwrites them with their gradient, and
multiplies that into the gradients of hidden states and weight: one matrix product of the output layer more than with
logits. Forward cannot make them, because the loss's gradients by log-probs, entropy and candidates are known only after
it.

`choose_linear` and `product` take the faster of torch's two CPU libraries, for this and for every other layer. torch
sends float32 products to MKL. How far oneDNN is ahead depends on the CPU. On one core of an AVX-512 EPYC MKL reached 89
GFLOP/s and oneDNN 219 (5,000 x 128 by 128 x 512); on one of a Zen 4 EPYC, which splits AVX-512, 66 to 90 and 80 to 105.
The accuracy in float32 is the same. Other dtypes reach oneDNN anyway. oneDNN's product is reached through an operator
without autograd, so it serves where gradients are made by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megasharp.ops.head import (
    HeadOutput,
    Kernels,
    Outputs,
    VocabShard,
    check_request,
    choose,
    constants,
    in_order,
    refuse_second_derivative,
)
from megasharp.ops.head.records import Arithmetic, Incoming, Request, ShardPart, Softmax, TargetCheck, join_over_group

# With a vocabulary of 152k in bfloat16, 311 MB of logits.
CHUNK_TOKENS = 1024
# Rows of the weight whose gradient is in memory at a time where it has another dtype than the sum.
_BLOCK_ROWS = 16_384


class _ChunkedContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    request: Request
    kernels: Kernels
    chunk_tokens: int
    weight_grad_VpH: Tensor | None
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def chunked_token_head(
    hidden_TH: Tensor,
    weight_VpH: Tensor,
    target_T: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    topn: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    kernels: Kernels = "auto",
    weight_grad_VpH: Tensor | None = None,
) -> HeadOutput:
    """Compute `token_head` of the logits hidden @ weight^T, `chunk_tokens` tokens at a time.

    `hidden_TH`: [T, H]; `weight_VpH`: [Vp, H], the rows of the output layer that belong to `shard`, of the same dtype,
    which the logits have too. All else is `token_head`'s.

    The gradient by the hidden states is that of this shard's columns: with a group, THE CALLER SUMS IT OVER THE GROUP
    (Megatron's `gather_from_sequence_parallel_region` or `copy_to_tensor_model_parallel_region` before the call does).
    The gradient by the weight is this rank's own; a frozen weight costs nothing. Chunks are added up in
    `weight_grad_VpH`, a float32 buffer of the weight's size that the caller holds (Megatron's `main_grad`): backward
    adds to what is in it, and returns zeros to autograd. Without it, several chunks are added up in a buffer of
    backward's own, which is rounded to the weight's dtype once. What else the weight is used for (a tied embedding)
    adds to either by autograd's own sum.

    Raises ValueError as `token_head` does, for `chunk_tokens` below 1, and for a `weight_grad_VpH` that is not float32
    (float64 for a float64 weight) or has another shape.
    """
    request = Request(shard, temperature, entropy, entropy_gradient, topn)
    check_request(request)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    buffer = weight_grad_VpH
    if buffer is not None and (buffer.dtype, buffer.shape) != (_sum_dtype(weight_VpH), weight_VpH.shape):
        raise ValueError(f"weight_grad_VpH must be float32 of shape {tuple(weight_VpH.shape)}")
    assert hidden_TH.shape[1] == weight_VpH.shape[1] and target_T.shape == hidden_TH.shape[:1], "[T, H], [Vp, H], [T]"
    assert 0 <= shard.valid <= weight_VpH.shape[0], "a shard has no more vocabulary than rows"
    outputs = cast(
        Outputs,
        _ChunkedHead.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weight_VpH, target_T, request, chunk_tokens, kernels, weight_grad_VpH
        ),
    )
    return HeadOutput(*outputs)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        hidden_TH: Tensor,
        weight_VpH: Tensor,
        target_T: Tensor,
        request: Request,
        chunk_tokens: int,
        kernels: Kernels,
        weight_grad_VpH: Tensor | None,
    ) -> Outputs:
        """Return `HeadOutput`'s fields in order, [T] or [T, N] each; logits [C, Vp] are there one chunk at a time.

        Raises ValueError where a target is outside the vocabulary.
        """
        check = TargetCheck(target_T)
        parts = []
        for begin, end in _chunks(len(target_T), chunk_tokens):
            logits_CVp, arithmetic = _logits(hidden_TH[begin:end], weight_VpH, request, kernels)
            parts.append(arithmetic.part(logits_CVp, target_T[begin:end], request))
            del logits_CVp
        joined = join_over_group(_side_by_side(parts), target_T, check, request)
        softmax = joined.softmax
        ctx.request, ctx.kernels, ctx.chunk_tokens = request, kernels, chunk_tokens
        ctx.weight_grad_VpH = weight_grad_VpH
        statistics = (softmax.max_T, softmax.log_sum_T, softmax.entropy_T, softmax.topn_id_TN)
        ctx.save_for_backward(*cast(tuple[Tensor, ...], (hidden_TH, weight_VpH, target_T, *statistics)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants(joined.output, request))
        return in_order(joined.output)

    @staticmethod
    def backward(
        ctx: _ChunkedContext,
        logp_grad_T: Tensor | None,
        entropy_grad_T: Tensor | None,
        topn_grad_TN: Tensor | None,
        *_: None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        """Return the gradients by `hidden_TH` [T, H] and `weight_VpH` [Vp, H], each None where not needed.

        Raises RuntimeError where a second derivative is asked for.
        """
        refuse_second_derivative()
        hidden_TH, weight_VpH, target_T, max_T, log_sum_T, entropy_T, topn_id_TN = ctx.saved_tensors
        softmax = Softmax(max_T, log_sum_T, entropy_T, topn_id_TN)
        incoming = Incoming(logp_grad_T, entropy_grad_T, topn_grad_TN)
        chunks = _chunks(len(target_T), ctx.chunk_tokens)
        hidden_grad_TH = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[1]
        weight_grad = _WeightGradient(weight_VpH, len(chunks), ctx.weight_grad_VpH) if needed else None
        for begin, end in chunks:
            hidden_CH = hidden_TH[begin:end]
            gradient_CVp, arithmetic = _logits(hidden_CH, weight_VpH, ctx.request, ctx.kernels)
            rows = softmax.rows(begin, end), incoming.rows(begin, end)
            arithmetic.gradient(gradient_CVp, gradient_CVp, target_T[begin:end], *rows, ctx.request)
            if hidden_grad_TH is not None:
                torch.mm(gradient_CVp, weight_VpH, out=hidden_grad_TH[begin:end])
            if weight_grad is not None:
                weight_grad.add(gradient_CVp, hidden_CH)
            del gradient_CVp
        return hidden_grad_TH, None if weight_grad is None else weight_grad.total(), None, None, None, None, None


class _WeightGradient:
    """The sum over chunks of gradient^T @ hidden, in the caller's buffer or one of its own."""

    def __init__(self, weight_VpH: Tensor, chunks: int, into_VpH: Tensor | None) -> None:
        self._weight, self._into = weight_VpH, into_VpH
        own = into_VpH is None and chunks > 1
        self._sum = torch.zeros_like(weight_VpH, dtype=_sum_dtype(weight_VpH)) if own else into_VpH

    def add(self, gradient_CVp: Tensor, hidden_CH: Tensor) -> None:
        """Add one chunk's gradient^T @ hidden, [Vp, H]: `gradient_CVp` is [C, Vp] and `hidden_CH` [C, H]."""
        if self._sum is None:
            self._sum = gradient_CVp.t() @ hidden_CH
        elif self._sum.dtype == gradient_CVp.dtype:
            self._sum.addmm_(gradient_CVp.t(), hidden_CH)
        else:
            for begin in range(0, len(self._sum), _BLOCK_ROWS):
                rows = slice(begin, begin + _BLOCK_ROWS)
                self._sum[rows].add_(gradient_CVp[:, rows].t() @ hidden_CH)

    def total(self) -> Tensor:
        """Return the gradient for autograd: zeros where the caller has the sum already."""
        if self._into is not None:
            return torch.zeros_like(self._weight)
        assert self._sum is not None
        return self._sum.to(self._weight.dtype)


def _sum_dtype(weight_VpH: Tensor) -> torch.dtype:
    # In bfloat16 a sum of many chunks would lose what a chunk adds.
    return torch.promote_types(weight_VpH.dtype, torch.float32)


def _chunks(tokens: int, chunk_tokens: int) -> Sequence[tuple[int, int]]:
    """List the begin and end of each chunk; without tokens one chunk of none."""
    starts = range(0, max(tokens, 1), chunk_tokens)
    return [(start, min(start + chunk_tokens, tokens)) for start in starts]


def _logits(hidden_CH: Tensor, weight_VpH: Tensor, request: Request, kernels: Kernels) -> tuple[Tensor, Arithmetic]:
    logits_CVp = hidden_CH @ weight_VpH.t()
    return logits_CVp, choose(logits_CVp, request.topn, kernels)


def _side_by_side(parts: Sequence[ShardPart]) -> ShardPart:
    """Join the parts of chunks of tokens as that of all tokens."""
    if len(parts) == 1:
        return parts[0]

    def joined(values: Iterator[Tensor | None]) -> Tensor | None:
        present = [x for x in values if x is not None]
        return torch.cat(present) if present else None

    return ShardPart(
        max_T=torch.cat([part.max_T for part in parts]),
        sum_T=torch.cat([part.sum_T for part in parts]),
        weighted_T=joined(part.weighted_T for part in parts),
        target_T=torch.cat([part.target_T for part in parts]),
        topn_logit_TN=joined(part.topn_logit_TN for part in parts),
        topn_id_TN=joined(part.topn_id_TN for part in parts),
    )


_Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """Return the operator, where this build of torch has it and it computes the right product."""
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        agrees = torch.equal(operator(x, weight, None, "none", [], ""), F.linear(x, weight))
    except (RuntimeError, TypeError):
        return None
    return operator if agrees else None


def choose_linear(dtype: torch.dtype, device: torch.device) -> _Linear:
    """Choose `F.linear`, or oneDNN's for float32 on the CPU, where no gradient flows through it.

    The function takes rows [..., in], weight [out, in] and bias [out] or None, and returns [..., out].
    """
    operator = _onednn() if dtype == torch.float32 and device.type == "cpu" else None
    if operator is None:
        return F.linear

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return operator(rows, weight, bias, "none", [], "")

    return linear


def product(a: Tensor, b: Tensor) -> Tensor | None:
    """Return `a @ b` for float32 [..., k] and [k, n] on a CPU, or None where torch's own product should be used.

    No gradient flows through it; the caller must not need one.
    """
    operator = _onednn()
    if operator is None or b.dim() != 2 or a.dim() < 2:
        return None
    if not (a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"):
        return None
    if not (a.numel() and b.numel()):
        return None
    if a.dim() == 2 and a.shape[0] > b.shape[1] and a.t().is_contiguous() and b.is_contiguous():
        # A weight's gradient. oneDNN copies its first operand into rows, so the narrower of the two comes first; the
        # sums are the same.
        return operator(b.t(), a, None, "none", [], "").t().contiguous()
    return operator(a, b.t(), None, "none", [], "")
