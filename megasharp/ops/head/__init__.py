"""Log-prob, entropy and top-N of each token from vocabulary-parallel logits, as one autograd function.

Backward is one dense pass. With z the logits of a token, T the temperature, p =
softmax(z / T) and H = -sum_v p_v log p_v:

    d log p_t / d z_v = (1[v = t] - p_v) / T            d H / d z_v = -p_v (log p_v + H) / T

so for incoming gradients g (target's log-prob), g_n (top-N log-probs) and g_H (entropy)

    dz_v = ( -p_v * (g + sum_n g_n + g_H (log p_v + H)) + g 1[v = t] + sum_n g_n 1[v = id_n] ) / T.

Only the logits and a few [T] statistics are kept for backward. Two arithmetics read the logits, `reference.py` in
torch and `kernel_launch.py` in Triton (one read forward, one pass backward). `records.py` joins the ranks for both.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import increment_version

from megasharp.ops.head.records import (
    Arithmetic,
    HeadOutput,
    Incoming,
    Request,
    Softmax,
    TargetCheck,
    VocabShard,
    join_over_group,
)
from megasharp.ops.head.reference import REFERENCE

__all__ = [
    "HeadOutput",
    "Kernels",
    "Outputs",
    "VocabShard",
    "check_request",
    "choose",
    "constants",
    "in_order",
    "refuse_second_derivative",
    "token_head",
]

Kernels = Literal["auto", "torch", "triton"]
Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]


class _HeadContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    request: Request
    arithmetic: Arithmetic
    overwrite: bool
    overwritten: bool
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
    overwrite_logits: bool = False,
    kernels: Kernels = "auto",
) -> HeadOutput:
    """Compute the log-prob of each target under softmax(logits / temperature) and, if asked, entropy and top-N.

    `logits_TVp`: [T, Vp] float32, bfloat16, float16 or float64, any strides; padding columns have no
    effect and get a gradient of exactly 0. `target_T`: int64 [T] global ids, the same on every rank of the
    group, as are the arguments after `shard`. Statistics are float32 (float64 for float64 logits).

    Gradients flow through `logp_T`, `topn_logp_TN` and, with `entropy_gradient`, `entropy_T`. Every rank must
    compute the same loss from its (equal) results; each then gets the gradient of its own columns, without
    communication. A group costs two all-reduces forward, and one all-gather more with `topn`. No second derivatives.

    With `overwrite_logits` backward writes the gradient over the logits, so it needs no second buffer of their size.
    The caller promises that nothing reads them afterwards. Where autograd saved them elsewhere, torch raises its error
    of tensors modified in place; a second backward raises RuntimeError; a detached alias goes unnoticed.

    `kernels`: "auto" is Triton for what it can read of logits on CUDA (not float64, `topn` <= 8, rows contiguous) and
    torch otherwise; "triton" insists on it, as tests do under its interpreter.

    Raises ValueError for a target outside the vocabulary, `topn` negative or beyond the vocabulary, a
    temperature that is not positive and finite, `entropy_gradient` without `entropy`, a leaf with `overwrite_logits`,
    and logits that `kernels="triton"` cannot read.
    """
    request = Request(shard, temperature, entropy, entropy_gradient, topn)
    check_request(request)
    assert logits_TVp.dim() == 2 and target_T.shape == logits_TVp.shape[:1], "logits [T, Vp], target [T]"
    assert 0 <= shard.valid <= logits_TVp.shape[1], "a shard has no more vocabulary than columns"
    if overwrite_logits and logits_TVp.is_leaf and logits_TVp.requires_grad:
        raise ValueError("overwrite_logits: these logits are a leaf, whose values the caller keeps")
    arithmetic = choose(logits_TVp, topn, kernels)
    outputs = cast(
        Outputs,
        _TokenHead.apply(logits_TVp, target_T, request, arithmetic, overwrite_logits),  # type: ignore[no-untyped-call]
    )
    return HeadOutput(*outputs)


def check_request(request: Request) -> None:
    """Raise ValueError for what cannot be computed of any logits."""
    if not (request.temperature > 0 and math.isfinite(request.temperature)):
        raise ValueError(f"temperature must be positive and finite, got {request.temperature}")
    if request.topn < 0:
        raise ValueError(f"topn must not be negative, got {request.topn}")
    if request.entropy_gradient and not request.entropy:
        raise ValueError("entropy_gradient=True needs entropy=True")
    shard = request.shard
    assert shard.group is not None or shard.start == 0, "without a group the shard is the vocabulary"


def choose(logits_TVp: Tensor, topn: int, kernels: Kernels) -> Arithmetic:
    """Choose the arithmetic for these logits. Raises ValueError where "triton" was asked for and cannot read them."""
    if kernels == "torch" or (kernels == "auto" and not logits_TVp.is_cuda):
        return REFERENCE
    from megasharp.ops.head.kernel_launch import TRITON, why_not

    reason = why_not(logits_TVp, topn)
    if reason is None:
        return TRITON
    if kernels == "triton":
        raise ValueError(f'kernels="triton": {reason}')
    return REFERENCE


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass whose own gradient is wanted: it would silently miss a part."""
    if torch.is_grad_enabled():
        raise RuntimeError("token_head has no second derivative: leave create_graph=True out")


def constants(output: HeadOutput, request: Request) -> list[Tensor]:
    """List the outputs that carry no gradient."""
    entropy_T = None if request.entropy_gradient else output.entropy_T
    found = [output.topn_id_TN, output.is_top1_T, output.normaliser_T, entropy_T]
    return [x for x in found if x is not None]


def in_order(output: HeadOutput) -> Outputs:
    """Return the fields as a tuple, which an autograd function must return."""
    return (
        output.logp_T,
        output.entropy_T,
        output.topn_logp_TN,
        output.topn_id_TN,
        output.is_top1_T,
        output.normaliser_T,
    )


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _HeadContext,
        logits_TVp: Tensor,
        target_T: Tensor,
        request: Request,
        arithmetic: Arithmetic,
        overwrite: bool,
    ) -> Outputs:
        """Return `HeadOutput`'s fields in order, [T] or [T, N] each, of `logits_TVp` [T, Vp] and `target_T` [T].

        Raises ValueError where a target is outside the vocabulary.
        """
        check = TargetCheck(target_T)
        part = arithmetic.part(logits_TVp, target_T, request)
        joined = join_over_group(part, target_T, check, request)
        softmax = joined.softmax
        ctx.request, ctx.arithmetic, ctx.overwrite, ctx.overwritten = request, arithmetic, overwrite, False
        saved = (logits_TVp, target_T, softmax.max_T, softmax.log_sum_T, softmax.entropy_T, softmax.topn_id_TN)
        ctx.save_for_backward(*cast(tuple[Tensor, ...], saved))
        # None instead of a dense zero tensor for every output that the loss did not use.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants(joined.output, request))
        return in_order(joined.output)

    @staticmethod
    def backward(
        ctx: _HeadContext,
        logp_grad_T: Tensor | None,
        entropy_grad_T: Tensor | None,
        topn_grad_TN: Tensor | None,
        *_: None,
    ) -> tuple[Tensor | None, None, None, None, None]:
        """Return the gradient by the logits, [T, Vp] in their dtype; with `overwrite` it lies where they were.

        Raises RuntimeError where a second derivative or, after overwriting, a second backward is asked for.
        """
        refuse_second_derivative()
        if ctx.overwritten:
            raise RuntimeError("token_head(overwrite_logits=True) has no second backward: the logits are overwritten")
        logits_TVp, target_T, max_T, log_sum_T, entropy_T, topn_id_TN = ctx.saved_tensors
        out_TVp = logits_TVp.detach() if ctx.overwrite else torch.empty_like(logits_TVp)
        softmax = Softmax(max_T, log_sum_T, entropy_T, topn_id_TN)
        incoming = Incoming(logp_grad_T, entropy_grad_T, topn_grad_TN)
        ctx.arithmetic.gradient(out_TVp, logits_TVp, target_T, softmax, incoming, ctx.request)
        if ctx.overwrite:
            ctx.overwritten = True
            # Kernels write behind autograd's back; this is what it would have noticed.
            increment_version(logits_TVp)
        return out_TVp, None, None, None, None
