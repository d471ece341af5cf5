"""Attention of packed rows by torch's variable-length flash attention: CUDA, bfloat16 or float16, without masks.

Rows stay as they are packed. The keys of each stretch of queries are gathered, a shared prompt's before a response's
own, and a query sees all of them up to its own position: the causal mask is aligned at the end of the keys
(arXiv 2307.08691, section 3.1 and the library's `flash_attn_varlen_func`). The kernel serves grouped queries itself:
keys and values are not repeated for their query heads.

With a response window (`block_plan`) no mask of the kernels says what a query sees. A long response's rows then attend
twice, to the last rows of their own run and to their prompt, and the two outputs are joined by their log-sum-exps. In
backward each part gets the joined output and log-sum-exp: its weights are the shares of the one softmax over both, and
the gradients of the parts add up.

Backward gathers again instead of keeping the gathered keys and values for every layer, and sums the gradients of a
prompt's keys and values over the responses that saw it in float32.

With deterministic algorithms torch's backward fixes the order of its additions, at the price of memory and time, and
`index_add_`, by which gradients are summed, has an implementation of its own (`tests/gpu/test_determinism.py`).

The operators of `aten` are called, and not `torch.nn.attention.varlen.varlen_attn`: its arguments have changed from
release to release (2.10 `is_causal`, later `window_size`, then `enable_gqa`), those of the operators below it have
only grown behind the ones used here. FlashAttention-2 computes them, or what `attention_setup` has put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megasharp.common.records import Segments
from megasharp.learner.block_plan import Spans, spans_of
from megasharp.learner.context_parallel import ContextCut, Exchange
from megasharp.ops.attention_kernels import HEAD_MULTIPLE, LARGEST_HEAD


@dataclass(frozen=True, slots=True, eq=False)
class VarlenPlan:
    """Queries in packed order cut into S stretches, and the keys of each; several such parts may share rows.

    `query_starts`, `key_starts`: int32 [S + 1], where each begins and the last ends. `most_queries`, `most_keys`: of
    one stretch. `key_rows`: int64 [K] the row of each key; None where the keys are all rows in their order.
    `all_rows`: the number of rows that keys are gathered from. `window`: positions that a query sees, its own included;
    None sees all. `query_rows`: int64, the rows that are queries; None: all. Without `causal` a query sees all keys of
    its stretch.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    key_rows: Tensor | None
    all_rows: int
    window: int | None
    query_rows: Tensor | None = None
    causal: bool = True


def supports(query: Tensor) -> bool:
    """Return whether the kernels can take such queries [P, heads, head_dim].

    Of heads these are FlashAttention-2's limits (arXiv 2307.08691; `mha_varlen_fwd` in torch's sources).
    """
    size = query.shape[-1]
    small = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and small and size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0


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


def response_plans(segments: Segments, num_rows: int, window: int, cut: ContextCut | None) -> list[VarlenPlan]:
    """Plan a response window: what it does not touch, then long responses with their own rows, then with their prompts.

    `num_rows`: of this rank. Parts without a query are left out.
    """
    size = num_rows if cut is None else cut.rows
    bounds = ((0, size),) if cut is None else cut.bounds
    places_P = torch.arange(size) if cut is None else cut.places()
    local_P = torch.arange(size) if cut is None else cut.own_places()
    runs = spans_of(segments, None)
    long = (segments.prefix >= 0) & (segments.length > window)
    untouched, responses = (runs.select(chosen).within(bounds, None) for chosen in (~long, long))
    recent = responses.recent(window)
    own = replace(recent, before=recent.start - recent.run_start)
    # Of the keys all are before the run's first row; the queries are the span's.
    prompts = replace(responses, start=responses.run_start, before=recent.before - own.before)
    parts = []
    for spans, seen, queries in ((untouched, None, untouched), (own, window, own), (prompts, None, recent)):
        if not spans.length.numel():
            continue
        causal = spans is not prompts
        keys = spans if causal else replace(spans, length=torch.zeros_like(spans.length))
        rows, starts = _rows_of(queries)
        plan = varlen_plan(keys, int(keys.length.sum()), seen, places_P)
        parts.append(
            replace(
                plan,
                query_starts=starts.to(torch.int32),
                most_queries=int(queries.length.max()),
                query_rows=local_P[rows],
                causal=causal,
            )
        )
    return parts


def _rows_of(spans: Spans) -> tuple[Tensor, Tensor]:
    """Return the packed rows of all queries, span by span, and where each span's begin and the last end."""
    starts = _starts(spans.length)
    span = torch.repeat_interleave(spans.length)
    return spans.start[span] + torch.arange(span.numel()) - starts[span], starts


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plans: Sequence[VarlenPlan],
    scale: float | None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Attend with [P, heads, head_dim] of queries to [P, groups, head_dim] of keys and values; like queries out.

    `plans` are the parts, on their device; `scale` None is head_dim^-0.5. With an `exchange` these are the rows of one
    rank, and the keys of `plans` those of all. No second derivatives.
    """
    out: Tensor = _VarlenAttention.apply(query, key, value, plans, scale, exchange)  # type: ignore[no-untyped-call]
    return out


class _Context(FunctionCtx):
    """The attributes that forward leaves for backward."""

    saved_tensors: tuple[Tensor, ...]
    plans: Sequence[VarlenPlan]
    scale: float | None
    exchange: Exchange | None


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plans: Sequence[VarlenPlan],
        scale: float | None,
        exchange: Exchange | None,
    ) -> Tensor:
        """Gather `key` and `value` [P, groups, head_dim] as planned, and attend with `query` [P, heads, head_dim].

        Returns [P, heads, head_dim] in the dtype of `query`.
        """
        all_keys, all_values = _of_all(key, exchange), _of_all(value, exchange)
        parts, states = [], []
        for plan in plans:
            keys, values = _chosen(all_keys, plan.key_rows), _chosen(all_values, plan.key_rows)
            out, log_sum, *state = flash_forward(_chosen(query, plan.query_rows), keys, values, plan, scale)
            parts.append((out, log_sum))
            states += state
        out, log_sum = parts[0] if len(plans) == 1 else _joined(query, plans, parts)
        ctx.save_for_backward(query, key, value, out, log_sum, *states)
        ctx.plans, ctx.scale, ctx.exchange = plans, scale, exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Return the gradients by `query`, `key` and `value`, of their shapes and dtypes; none by the rest.

        The gradient that comes in is [P, heads, head_dim].
        """
        query, key, value, out, log_sum, *states = ctx.saved_tensors
        plans, exchange = ctx.plans, ctx.exchange
        # Gathered again: kept, they would take memory in every layer until backward.
        all_keys, all_values = _of_all(key, exchange), _of_all(value, exchange)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, plan in enumerate(plans):
            rows = plan.query_rows
            gradient, queries, outs = (_chosen(x, rows) for x in (gradients[0], query, out))
            keys, values = _chosen(all_keys, plan.key_rows), _chosen(all_values, plan.key_rows)
            share = log_sum if rows is None else log_sum.index_select(1, rows)
            statistics = [share, *states[2 * number : 2 * number + 2]]
            found.append(
                flash_backward(gradient.contiguous(), queries, keys, values, outs, statistics, plan, ctx.scale)
            )
        of_queries, of_keys, of_values = zip(*found, strict=True)
        query_grad = of_queries[0] if len(plans) == 1 else _added(of_queries, [p.query_rows for p in plans], len(query))
        return query_grad, _summed(of_keys, plans, exchange), _summed(of_values, plans, exchange), None, None, None


def _of_all(x: Tensor, exchange: Exchange | None) -> Tensor:
    return x if exchange is None else exchange.gather(x)


def _chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _joined(
    query: Tensor, plans: Sequence[VarlenPlan], parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Join outputs over different keys to those of one softmax over all; returns its log-sum-exp [heads, P], too."""
    exact = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros_like(query, dtype=exact)
    log_sum = torch.full(query.shape[1::-1], float("-inf"), dtype=parts[0][1].dtype, device=query.device)
    for plan, (out, its_log_sum) in zip(plans, parts, strict=True):
        rows = plan.query_rows
        assert rows is not None
        before = log_sum.index_select(1, rows)
        after = torch.logaddexp(before, its_log_sum)
        # [heads, rows] to [rows, heads, 1].
        kept, new = ((x - after).exp().T[..., None] for x in (before, its_log_sum))
        total[rows] = total.index_select(0, rows) * kept + out.to(exact) * new
        log_sum[:, rows] = after
    return total.to(query.dtype), log_sum


def _summed(gradients: Sequence[Tensor], plans: Sequence[VarlenPlan], exchange: Exchange | None) -> Tensor:
    """Sum the gradients of gathered rows back into a rank's rows, over a row's copies in all parts, on all ranks."""
    rows = [plan.key_rows for plan in plans]
    if rows == [None]:
        return gradients[0]
    # A prompt's keys are seen by many responses: in bfloat16 a long sum would lose what each adds.
    exact = torch.promote_types(gradients[0].dtype, torch.float32)
    total = _added([gradient.to(exact) for gradient in gradients], rows, plans[0].all_rows)
    return (total if exchange is None else exchange.scatter_sum(total)).to(gradients[0].dtype)


def _added(parts: Sequence[Tensor], rows: Sequence[Tensor | None], count: int) -> Tensor:
    """Add parts, each of the rows named, into `count` rows."""
    total = torch.zeros(count, *parts[0].shape[1:], dtype=parts[0].dtype, device=parts[0].device)
    for part, its_rows in zip(parts, rows, strict=True):
        assert its_rows is not None
        total.index_add_(0, its_rows, part)
    return total


class _GatheredContext(FunctionCtx):
    """The attributes that forward leaves for backward."""

    plan: VarlenPlan
    exchange: Exchange | None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatheredContext, x: Tensor, plan: VarlenPlan, exchange: Exchange | None) -> Tensor:
        """Gather `x` [P, groups, head_dim] as planned: [K, groups, head_dim]."""
        ctx.plan, ctx.exchange = plan, exchange
        return _chosen(_of_all(x, exchange), plan.key_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: _GatheredContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by `x`, of its shape and dtype, of one [K, groups, head_dim] that comes in."""
        return _summed(gradients, [ctx.plan], ctx.exchange), None, None


def gathered(x: Tensor, plan: VarlenPlan, exchange: Exchange | None) -> Tensor:
    """Gather keys or values [P, groups, head_dim] as planned, [K, groups, head_dim], for attention by others' kernels.

    Backward sums as `varlen_attention` does, in float32. No second derivatives.
    """
    if plan.key_rows is None and exchange is None:
        return x
    rows: Tensor = _Gathered.apply(x, plan, exchange)  # type: ignore[no-untyped-call]
    return rows


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
        query, key, value, *_lengths(plan), 0.0, _is_causal(plan), False, scale=scale, **_window(plan)
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
        gradient, query, key, value, out, log_sum, *_lengths(plan), 0.0, _is_causal(plan), state, unused,
        scale=scale, **_window(plan),
    )  # fmt: skip


def _lengths(plan: VarlenPlan) -> tuple[Tensor, Tensor, int, int]:
    return plan.query_starts, plan.key_starts, plan.most_queries, plan.most_keys


def _is_causal(plan: VarlenPlan) -> bool:
    return plan.causal and plan.window is None


def _window(plan: VarlenPlan) -> dict[str, int]:
    """Return the kernel's window: positions seen to the left and right of a query; nothing where there is no limit.

    -1 would be no limit too, but to FA4 in torch 2.11, whose backward refuses every number.
    """
    return {} if plan.window is None else {"window_size_left": plan.window - 1, "window_size_right": 0}
