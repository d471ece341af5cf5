"""A decode step's attention: one query per row and head against the row's prompt and its own tokens.

A prompt is one product for all rows that read it, the own tokens are one product per (block, key-value head). While
every row has one block, one softmax is taken over both. Where rows have several, it is taken block by block: each
row's largest score first, then sums of exponentials and of values, over its blocks and its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.rollout.inprocess.cache import Blocks, KeyValueCache, Step, View


def attend_step(cache: KeyValueCache, step: Step, layer: int, query: Tensor, view: View) -> Tensor:
    """[S, heads * head_dim], of `query` [S, heads, head_dim]; the cache already has the step's own keys and values."""
    rows, heads, dim = query.shape
    keys, values = cache.own(layer, view.first, step.filled)
    prompt_keys, prompt_values = cache.shared(layer)
    kv_heads = cache.keys[layer].shape[1]
    grid = _group_major(cache, query.view(rows, kv_heads, -1, dim))
    shared = _row_major(cache, _scores(grid, prompt_keys, cache.prompts.mask), kv_heads).reshape(rows, heads, -1)
    if view.hidden_SP is not None:
        shared = shared.masked_fill(view.hidden_SP[:, None], float("-inf"))
    queries = query if step.blocks is None else query.index_select(0, step.blocks.row_N)
    own = _scores(queries.reshape(keys.shape[0], -1, dim), keys, view.mask)
    if step.blocks is not None:
        return _over_blocks(cache, step.blocks, shared, own, prompt_values, values)
    own = own.view(rows, heads, -1)
    padded = shared.shape[-1]
    weights = torch.softmax(torch.cat([shared, own], dim=-1), dim=-1)
    mixed = _of_prompts(cache, weights[:, :, :padded], prompt_values, kv_heads).reshape(keys.shape[0], -1, dim)
    weights = weights[:, :, padded:].reshape(*mixed.shape[:2], -1)
    return torch.baddbmm(mixed, weights, values).view(rows, -1)


def _over_blocks(
    cache: KeyValueCache, blocks: Blocks, shared: Tensor, own: Tensor, prompt_values: Tensor, values: Tensor
) -> Tensor:
    """[S, heads * head_dim], of scores with prompts [S, heads, prompt] and with own blocks [N * kv_heads, _, slots]."""
    rows, heads, _ = shared.shape
    count, dim, dtype = blocks.row_N.numel(), values.shape[-1], values.dtype
    # Half precisions are summed in float32, as inside one product.
    wide = torch.promote_types(dtype, torch.float32)
    shared, own = shared.to(wide), own.view(count, heads, -1).to(wide)
    largest = own.new_full((rows, blocks.width + 1, heads), float("-inf"))
    largest.flatten(0, 1).index_copy_(0, blocks.place_N, own.amax(dim=-1))
    largest[:, -1] = shared.amax(dim=-1)
    largest_S = largest.amax(dim=1)
    shared = shared.sub_(largest_S[:, :, None]).exp_()
    own = own.sub_(largest_S.index_select(0, blocks.row_N)[:, :, None]).exp_()
    total_S = shared.sum(dim=-1).index_add_(0, blocks.row_N, own.sum(dim=-1))
    kv_heads = values.shape[0] // count
    mixed = _of_prompts(cache, shared.to(dtype), prompt_values, kv_heads).reshape(rows, heads, dim).to(wide)
    of_blocks = torch.bmm(own.view(count * kv_heads, heads // kv_heads, -1).to(dtype), values)
    mixed = mixed.index_add_(0, blocks.row_N, of_blocks.view(count, heads, dim).to(wide))
    return mixed.div_(total_S[:, :, None]).flatten(1).to(dtype)


def _of_prompts(cache: KeyValueCache, weights: Tensor, values: Tensor, kv_heads: int) -> Tensor:
    """Sums of prompts' values [S, kv_heads, repeat, head_dim], of weights [S, heads, prompt]."""
    rows, heads, padded = weights.shape
    grid = _group_major(cache, weights.reshape(rows, kv_heads, heads // kv_heads, padded))
    return _row_major(cache, torch.bmm(grid, values), kv_heads)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled products [n, queries, keys], plus the mask."""
    scale = queries.shape[-1] ** -0.5
    if mask is None:
        return torch.baddbmm(queries.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)


def _group_major(cache: KeyValueCache, rows: Tensor) -> Tensor:
    """[S, kv_heads, repeat, n] as [B * kv_heads, width * repeat, n]: the readers of one prompt's head."""
    return cache.to_grid(rows).transpose(1, 2).flatten(0, 1).flatten(1, 2)


def _row_major(cache: KeyValueCache, grouped: Tensor, kv_heads: int) -> Tensor:
    """The inverse of `_group_major`."""
    _, queries, columns = grouped.shape
    grid = grouped.view(-1, kv_heads, cache.width, queries // cache.width, columns)
    return cache.from_grid(grid.transpose(1, 2))
