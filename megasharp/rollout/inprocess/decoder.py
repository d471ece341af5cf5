"""A compact decoder for the dense families: prompts once, then one token per row and step, against a cache.

Written for small models, where the cost is many small operations: fused projections, one complex
multiplication for the rotary embedding, one matrix product per (row, key-value head) for a step's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.rope import rotary_frequencies
from megasharp.ops.linear import choose_linear
from megasharp.rollout.inprocess.cache import KeyValueCache, View
from megasharp.rollout.inprocess.weights import DecoderWeights, LayerWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Positions whose rotations are computed at first; more when a sequence gets there.
FIRST_POSITIONS = 128


class Decoder:
    """Next-token logits from `weights`. `prefill` opens a cache, `step` moves it on by one token per row."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.architecture = architecture
        self.device = device
        self.weights = DecoderWeights(architecture, dtype, device)
        self._dtype = dtype
        self._linear = choose_linear(dtype, device)
        self._rotations = _rotations(architecture, FIRST_POSITIONS, dtype, device)
        self._windows = [architecture.window(layer) for layer in range(architecture.num_layers)]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, KeyValueCache]:
        """Read each prompt once. Returns the logits after each, [B, V], and a cache of B rows."""
        hidden, cache = self._read(prompts)
        padded = cache.prompt_keys[0].shape[2]
        last = torch.arange(len(prompts), device=self.device) * padded + cache.lengths_B - 1
        return self._logits(hidden.index_select(0, last)), cache

    def read(self, tokens: Sequence[int], first: int, rows: int) -> Iterator[Tensor]:
        """The logits that predict tokens `first` (at least 1) and later of one text, at most [`rows`, V] at a time."""
        hidden, _ = self._read([tokens])
        for part in torch.split(hidden[first - 1 : -1], rows):
            yield self._logits(part)

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, KeyValueCache]:
        """Final hidden states [B * padded length, H] before the last norm, and the cache."""
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        padded = int(lengths_B.max())
        tokens = torch.tensor([[*prompt, *([0] * (padded - len(prompt)))] for prompt in prompts], device=self.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        masks = {window: _band(padded, window, self.device) for window in set(self._windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = (_as_prompts(part, padded) for part in (query, key, value))
            keys.append(key)
            values.append(value)
            mask = masks[self._windows[layer]]
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

        positions = torch.arange(padded, device=self.device).repeat(len(prompts))
        hidden = self._hidden(tokens.flatten(), positions, padded, attend)
        return hidden, KeyValueCache(keys, values, lengths_B)

    def step(self, tokens_S: Tensor, cache: KeyValueCache) -> Tensor:
        """Append `tokens_S` (int64, one per row of `cache`); returns the logits that follow, [S, V]."""
        cache.make_room()
        views = {window: cache.view(window) for window in set(self._windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.keys[layer][:, :, cache.length] = key
            cache.values[layer][:, :, cache.length] = value
            return self._attend_step(cache, layer, query, views[self._windows[layer]])

        highest = cache.prompt_keys[0].shape[2] + cache.length + 1
        hidden = self._hidden(tokens_S, cache.positions, highest, attend)
        cache.length += 1
        return self._logits(hidden)

    def _hidden(self, tokens_T: Tensor, positions_T: Tensor, highest: int, attend: Attend) -> Tensor:
        """Final hidden states [T, H] before the last norm; positions are below `highest`."""
        if highest > self._rotations.shape[0]:
            self._rotations = _rotations(self.architecture, 2 * highest, self._dtype, self.device)
        rotation_T = self._rotations.index_select(0, positions_T).unsqueeze(1)
        hidden = F.embedding(tokens_T, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.input_norm)
            mixed = attend(index, *self._query_key_value(layer, normed, rotation_T))
            hidden = self._linear(mixed, layer.output, None).add_(hidden)
            gate, up = self._linear(self._norm(hidden, layer.post_norm), layer.gate_up, None).chunk(2, dim=-1)
            hidden = self._linear(F.silu(gate).mul_(up), layer.down, None).add_(hidden)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._linear(self._norm(hidden, self.weights.norm), self.weights.head, None)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.architecture.norm_eps)

    def _query_key_value(
        self, layer: LayerWeights, normed: Tensor, rotation_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim] and keys, and values [T, kv_heads, head_dim]."""
        a = self.architecture
        fused = self._linear(normed, layer.qkv, layer.qkv_bias).view(-1, a.heads + 2 * a.kv_heads, a.head_dim)
        query_key, value = fused.tensor_split([a.heads + a.kv_heads], dim=1)
        if layer.query_key_norm is not None:
            query_key = F.rms_norm(query_key, (a.head_dim,), None, a.norm_eps).mul_(layer.query_key_norm)
        query, key = _rotate(query_key, rotation_T).tensor_split([a.heads], dim=1)
        return query, key, value

    def _attend_step(self, cache: KeyValueCache, layer: int, query: Tensor, view: View) -> Tensor:
        """One query per row and head against the row's prompt and its own tokens, the newest included."""
        a = self.architecture
        rows, repeat = query.shape[0], a.heads // a.kv_heads
        keys = cache.keys[layer][:, :, view.first : cache.length + 1].flatten(0, 1)
        values = cache.values[layer][:, :, view.first : cache.length + 1].flatten(0, 1)
        queries = query.reshape(-1, repeat, a.head_dim)
        own = _scores(queries, keys, None)
        grid = _group_major(cache, queries.view(rows, a.kv_heads, repeat, -1))
        shared = _scores(grid, cache.prompt_keys[layer].flatten(0, 1), view.mask)
        shared = _row_major(cache, shared, a.kv_heads).reshape(*own.shape[:2], -1)
        weights = torch.softmax(torch.cat([shared, own], dim=-1), dim=-1)
        padded = shared.shape[-1]
        grid = _group_major(cache, weights[:, :, :padded].reshape(rows, a.kv_heads, repeat, -1))
        mixed = torch.bmm(grid, cache.prompt_values[layer].flatten(0, 1))
        mixed = _row_major(cache, mixed, a.kv_heads).reshape(-1, repeat, a.head_dim)
        return torch.baddbmm(mixed, weights[:, :, padded:], values).view(rows, -1)


def _as_prompts(heads_T: Tensor, padded: int) -> Tensor:
    """[B * padded, n, head_dim] as [B, n, padded, head_dim]; causal attention hides padding on the right."""
    heads, dim = heads_T.shape[1:]
    return heads_T.reshape(-1, padded, heads, dim).transpose(1, 2).contiguous()


def _band(count: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [count, count]: which positions each of `count` sees; None where plain causal attention says the same."""
    if window is None or window >= count:
        return None
    ones = torch.ones(count, count, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


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


def _rotations(a: Architecture, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Complex [count, head_dim / 2]: the rotation of each position, in float32 as transformers has it."""
    frequencies, scaling = rotary_frequencies(a)
    angles = torch.outer(torch.arange(count, dtype=torch.float32), frequencies)
    rotations = torch.polar(torch.full_like(angles, scaling), angles)
    return rotations.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)


def _rotate(query_key: Tensor, rotation_T: Tensor) -> Tensor:
    """Rotate interleaved heads [T, n, head_dim]; half precisions pass through float32."""
    wide = query_key.to(rotation_T.real.dtype)
    pairs = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation_T).flatten(-2).to(query_key.dtype)
