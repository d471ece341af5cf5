"""Attention of packed rows by torch's variable-length flash attention: CUDA, bfloat16 or float16, without masks.

Rows stay as they are packed. The keys of each stretch of queries are gathered, a shared prompt's before a response's
own, and a query sees all of them up to its own position: the causal mask is aligned at the end of the keys
(arXiv 2307.08691, section 3.1 and the library's `flash_attn_varlen_func`). The kernel serves grouped queries itself:
keys and values are not repeated for their query heads.

Backward gathers again instead of keeping the gathered keys and values for every layer, and sums the gradients of a
prompt's keys and values over the responses that saw it in float32.

With deterministic algorithms torch's backward fixes the order of its additions, at the price of memory and time, and
`index_add_`, by which gradients are summed, has an implementation of its own (`tests/gpu/test_determinism.py`).

The operators of `aten` are called, and not `torch.nn.attention.varlen.varlen_attn`: its arguments have changed from
release to release (2.10 `is_causal`, later `window_size`, then `enable_gqa`), those of the operators below it have
only grown behind the ones used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megasharp.learner.block_plan import Spans
from megasharp.learner.context_parallel import Exchange

# The kernels' own limits (arXiv 2307.08691; `mha_varlen_fwd` in torch's sources).
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8


@dataclass(frozen=True, slots=True, eq=False)
class VarlenPlan:
    """Queries in packed order cut into S stretches, and the keys of each.

    `query_starts`, `key_starts`: int32 [S + 1], where each begins and the last ends. `most_queries`, `most_keys`: of
    one stretch. `key_rows`: int64 [K] the row of each key; None where the keys are all rows in their order.
    `all_rows`: the number of rows that keys are gathered from. `window`: positions that a query sees, its own included;
    None sees all.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    key_rows: Tensor | None
    all_rows: int
    window: int | None


def supports(query: Tensor) -> bool:
    """Return whether the kernels can take such queries [P, heads, head_dim]."""
    size = query.shape[-1]
    small = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and small and size <= _LARGEST_HEAD and size % _HEAD_MULTIPLE == 0


def varlen_plan(spans: Spans, num_rows: int, window: int | None, places_P: Tensor | None = None) -> VarlenPlan:
    """Plan spans that cover `num_rows` rows of queries in order; built on the CPU, once per micro-batch and window.

    `places_P` (int64) is the place of each packed row among the keys, if not its own number.
    """
    keys = spans.before + spans.length
    assert int(spans.length.sum()) == num_rows, "every packed row belongs to exactly one span"
    key_starts = _starts(keys)
    span = torch.repeat_interleave(keys)
    row_K = spans.seen(span, torch.arange(span.numel()) - key_starts[span] - spans.before[span])
    row_K = row_K if places_P is None else places_P[row_K]
    # Without shared prompts the keys are the rows themselves, and no layer gathers any.
    in_order = places_P is None and row_K.numel() == num_rows and bool((row_K == torch.arange(num_rows)).all())
    return VarlenPlan(
        query_starts=_starts(spans.length).to(torch.int32),
        key_starts=key_starts.to(torch.int32),
        most_queries=int(spans.length.max()),
        most_keys=int(keys.max()),
        key_rows=None if in_order else row_K,
        all_rows=num_rows if places_P is None else places_P.numel(),
        window=window,
    )


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float | None, exchange: Exchange | None = None
) -> Tensor:
    """Attend with [P, heads, head_dim] of queries to [P, groups, head_dim] of keys and values; like queries out.

    `plan` is on their device; `scale` None is head_dim^-0.5. With an `exchange` these are the rows of one rank, and the
    keys of `plan` those of all. No second derivatives.
    """
    out: Tensor = _VarlenAttention.apply(query, key, value, plan, scale, exchange)  # type: ignore[no-untyped-call]
    return out


class _Context(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    plan: VarlenPlan
    scale: float | None
    exchange: Exchange | None


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: VarlenPlan,
        scale: float | None,
        exchange: Exchange | None,
    ) -> Tensor:
        """Gather `key` and `value` [P, groups, head_dim] as planned, and attend with `query` [P, heads, head_dim].

        Returns [P, heads, head_dim] in the dtype of `query`.
        """
        keys, values = _gathered(key, plan, exchange), _gathered(value, plan, exchange)
        out, *statistics = flash_forward(query, keys, values, plan, scale)
        ctx.save_for_backward(query, key, value, out, *statistics)
        ctx.plan, ctx.scale, ctx.exchange = plan, scale, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Return the gradients by `query`, `key` and `value`, of their shapes and dtypes; none by the rest.

        The gradient that comes in is [P, heads, head_dim].
        """
        query, key, value, out, *statistics = ctx.saved_tensors
        plan, exchange = ctx.plan, ctx.exchange
        # Gathered again: kept, they would take memory in every layer until backward.
        keys, values = _gathered(key, plan, exchange), _gathered(value, plan, exchange)
        query_grad, keys_grad, values_grad = flash_backward(
            gradients[0].contiguous(), query, keys, values, out, statistics, plan, ctx.scale
        )
        key_grad, value_grad = _summed(keys_grad, plan, exchange), _summed(values_grad, plan, exchange)
        return query_grad, key_grad, value_grad, None, None, None


def _gathered(x: Tensor, plan: VarlenPlan, exchange: Exchange | None) -> Tensor:
    x = x if exchange is None else exchange.gather(x)
    return x if plan.key_rows is None else x.index_select(0, plan.key_rows)


def _summed(gradient: Tensor, plan: VarlenPlan, exchange: Exchange | None) -> Tensor:
    """Sum the gradients of gathered rows back into a rank's rows, over a row's copies on all ranks."""
    if plan.key_rows is None:
        return gradient
    # A prompt's keys are seen by many responses: in bfloat16 a long sum would lose what each adds.
    exact = torch.promote_types(gradient.dtype, torch.float32)
    total = torch.zeros(plan.all_rows, *gradient.shape[1:], dtype=exact, device=gradient.device)
    total.index_add_(0, plan.key_rows, gradient.to(exact))
    return (total if exchange is None else exchange.scatter_sum(total)).to(gradient.dtype)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float | None
) -> tuple[Tensor, ...]:
    """Return the output [P, heads, head_dim] and three statistics, which `flash_backward` takes.

    `query` is [P, heads, head_dim]; `key` and `value` are [K, groups, head_dim], gathered as `plan` says. Statistics:
    log-sum-exp of each row's scores, float32 [heads, P]; the random state of dropout, which is off, uint64 [2]; and an
    unused uint64 scalar (shapes by torch 2.13's meta registrations).
    """
    forward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
    # The numbers are dropout, causal and "return the softmax"; with a window the kernel is causal by its right side, 0.
    out, log_sum, state, unused, _ = forward(
        query, key, value, *_lengths(plan), 0.0, plan.window is None, False, scale=scale, **_window(plan)
    )
    return out, log_sum, state, unused


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: list[Tensor],
    plan: VarlenPlan,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, gathered keys and gathered values, of their shapes and dtypes.

    `gradient` (contiguous), `query` and `out` are [P, heads, head_dim], `key` and `value` [K, groups, head_dim];
    `statistics` are the three of `flash_forward`.
    """
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten._flash_attention_backward
    log_sum, state, unused = statistics
    return backward(
        gradient, query, key, value, out, log_sum, *_lengths(plan), 0.0, plan.window is None, state, unused,
        scale=scale, **_window(plan),
    )  # fmt: skip


def _lengths(plan: VarlenPlan) -> tuple[Tensor, Tensor, int, int]:
    return plan.query_starts, plan.key_starts, plan.most_queries, plan.most_keys


def _window(plan: VarlenPlan) -> dict[str, int]:
    """Return the kernel's window: positions seen to the left and right of a query; -1 is no limit."""
    return {"window_size_left": -1 if plan.window is None else plan.window - 1, "window_size_right": 0}
