"""A memory network that sees the prompt and the last N tokens: which keys a query has, and attention to them.

Pure torch. A key at position j is seen by the query at position i >= j iff j is in the prompt, or j > i - N. Keys carry
their positions, so those that no query of a step sees are left out of it, wherever they stood; `memory_pool.py` frees
their cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The keys that the queries of one request see in one step.

    `queries` are their rows in the step's batch. `keys_K` int64 [K] are positions in the request's sequence, ascending.
    `mask_QK` bool [Q, K] is true where a query sees a key; None where each sees all (one query), or, with `causal`,
    where query and key are the same tokens from the sequence's first one on.
    """

    queries: slice
    keys_K: Tensor
    mask_QK: Tensor | None
    causal: bool


def seen_in_step(prompts: Sequence[int], begins: Sequence[int], ends: Sequence[int], window: int) -> list[Seen]:
    """Return one entry a request: its tokens at positions [begin, end) are fed, after a prompt of so many tokens."""
    seen, row = [], 0
    for prompt, begin, end in zip(prompts, begins, ends, strict=True):
        after = min(end, max(prompt, begin - window + 1))
        keys_K = torch.cat([torch.arange(min(prompt, end)), torch.arange(after, end)])
        queries = slice(row, row + end - begin)
        causal = begin == 0 and end <= prompt
        mask_QK = None
        if end - begin > 1 and not causal:
            query_Q1 = torch.arange(begin, end)[:, None]
            mask_QK = (keys_K <= query_Q1) & ((keys_K < prompt) | (keys_K > query_Q1 - window))
        seen.append(Seen(queries, keys_K, mask_QK, causal))
        row = queries.stop
    return seen


def attend(q_QHD: Tensor, k_KHD: Tensor, v_KHD: Tensor, seen: Seen, scale: float) -> Tensor:
    """Attention of one request's queries, [Q, H, D]; `k_KHD` and `v_KHD` may have fewer heads, each for a group."""
    q, k, v = (each.transpose(0, 1)[None] for each in (q_QHD, k_KHD, v_KHD))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=seen.mask_QK, is_causal=seen.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)
