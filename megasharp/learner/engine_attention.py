"""Attention of packed rows by Transformer Engine's DotProductAttention: cuDNN's kernels, or a flash-attn of its choice.

It takes packed stretches (`thd`) of queries and of keys of other lengths, with the causal mask aligned at their ends.
Where a stretch's keys begin it cannot be told apart from where the one before ends, so that two stretches cannot read
the same prompt in place: the keys are gathered, a prompt's once for each response, as `flash_varlen` does. It is a
module with a backward of its own, which keeps the gathered keys and values until then, in every layer; `flash_varlen`
gathers them again. It returns no log-sum-exps, so response windows, whose parts are joined by them, are refused
(decision 0058).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from megasharp.learner.context_parallel import Exchange
from megasharp.learner.flash_varlen import VarlenPlan, gathered


def engine_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float | None, exchange: Exchange | None = None
) -> Tensor:
    """Return [P, heads * head_dim] of queries [P, heads, head_dim], and keys and values [P, groups, head_dim].

    `plan` is the only part, on their device; `scale` None is head_dim^-0.5. With an `exchange` these are the rows of
    one rank, and the keys of `plan` those of all.
    """
    assert plan.query_rows is None and plan.causal, "response windows are refused"
    keys, values = gathered(key, plan, exchange), gathered(value, plan, exchange)
    attend = operator(query.shape[1], key.shape[1], query.shape[2], scale)
    out = attend(
        query.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        qkv_format="thd",
        cu_seqlens_q=plan.query_starts,
        cu_seqlens_kv=plan.key_starts,
        max_seqlen_q=plan.most_queries,
        max_seqlen_kv=plan.most_keys,
        attn_mask_type="padding_causal_bottom_right",
        window_size=(-1 if plan.window is None else plan.window - 1, 0),
        # Else it may compare the starts on the device, and wait for that.
        pad_between_seqs=False,
    )
    return out.reshape(len(query), -1)


@cache
def operator(heads: int, groups: int, head_dim: int, scale: float | None) -> Callable[..., Tensor]:
    """Return the module for a rank's heads. All layers share it: it has no weights, and no dropout's random state.

    Kept out of the model, whose checkpoints would otherwise have its FP8 state.
    """
    # Without its kernels, plain products would hold the scores of whole stretches: better an error at the start.
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
    from transformer_engine.pytorch import DotProductAttention

    made: Any = DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        attention_type="cross",
        softmax_scale=scale,
    )
    call: Callable[..., Tensor] = made
    return call
