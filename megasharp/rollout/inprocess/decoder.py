"""A compact decoder for the dense families: prompts once, then one token per row and step, against a cache.

It is written for small models, where the cost is many small operations: fused projections, one complex multiplication
for the rotary embedding, one matrix product per (row, key-value head) for a step's attention.

`KeyValueCache` holds keys and values of past tokens: one copy per prompt, and one row per sample for what it drew
since. The samples of a group share their prompt's part, so a step reads each prompt once however many samples it has.
With 48 prompts of 150 tokens and 8 samples each this took three quarters of the time of a cache that copies the prompt
into every row; with prompts of 14 tokens the two were equal (one core).

`DecoderWeights` holds the weights in fused buffers, with a table of where each Hugging Face tensor goes in them. Query
and key rows are stored with the halves of each head interleaved (dimension `i` next to `i + head_dim / 2`): a rotary
rotation is then one complex multiplication, and the products of queries with keys do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.convert.architecture import Architecture
from megasharp.convert.rope import rotary_frequencies
from megasharp.ops.chunked_head import choose_linear

# Slots added when a row is full, or a quarter of the capacity where that is more. Kept tight because a step reads
# every row: free slots between them cost more (15 % of generation with 32 slots for 18 tokens) than growing does.
GROWTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The positions that a step's queries see: of the prompt those in `mask`, and own slots from `first` on.

    `mask` is float [B * kv_heads, 1, prompt]; None: all.
    """

    mask: Tensor | None
    first: int


class KeyValueCache:
    """Per layer, `prompt_keys` [B, kv_heads, prompt, head_dim] and `keys` [S, kv_heads, capacity, head_dim].

    Prompts are padded on the right to one length; `mask`, float [B * kv_heads, 1, prompt], hides the
    padding (None when there is none). Slots `0 .. length - 1` of `keys` and `values` are filled, alike in all rows.
    Row `s` reads prompt `prompt_S[s]`, and sits at place `place_S[s]` of the grid [B, width] that lays out the
    rows by prompt (None when row `s` is simply place `s`).

    With a `response_window` W a row has the last W of its own tokens, `capacity` is at most W, and the newest token
    takes the oldest one's slot. Their order in memory then is not that of their positions, which are in the keys.
    """

    def __init__(
        self,
        prompt_keys: list[Tensor],
        prompt_values: list[Tensor],
        lengths_B: Tensor,
        response_window: int | None = None,
    ) -> None:
        self.prompt_keys = prompt_keys
        self.prompt_values = prompt_values
        self.lengths_B = lengths_B
        self.mask = self._padding_mask()
        self.length = 0
        self._response_window = response_window
        self.prompt_S = torch.arange(lengths_B.numel(), device=lengths_B.device)
        self.keys = self._empty(0)
        self.values = self._empty(0)
        self._lay_out()

    @property
    def positions(self) -> Tensor:
        """int64 [S]: the position of each row's next token."""
        return self.lengths_B.index_select(0, self.prompt_S) + self.length

    @property
    def slot(self) -> int:
        """The slot of each row's next token."""
        return self.length if self._response_window is None else self.length % self._response_window

    @property
    def filled(self) -> int:
        """Slots that have a token once each row has its next one."""
        return min(self.length + 1, self.keys[0].shape[2])

    def view(self, window: int | None) -> View:
        """For the next token, in a layer where a query sees `window` positions, its own included (None: all)."""
        if window is None or window > self.prompt_keys[0].shape[2] + self.length:
            return View(self.mask, 0)
        oldest_B = self.lengths_B + self.length + 1 - window
        return View(self._prompt_mask(oldest_B), max(0, self.length + 1 - window))

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) in that order; prompts without a row are freed."""
        self.keys = [tensor.index_select(0, rows) for tensor in self.keys]
        self.values = [tensor.index_select(0, rows) for tensor in self.values]
        self.prompt_S = self.prompt_S.index_select(0, rows)
        used_B = self.prompt_S.bincount(minlength=self.lengths_B.numel()) > 0
        if not bool(used_B.all()):
            prompts = used_B.nonzero().squeeze(1)
            self.prompt_S = (used_B.cumsum(0) - 1).index_select(0, self.prompt_S)
            self.prompt_keys = [tensor.index_select(0, prompts) for tensor in self.prompt_keys]
            self.prompt_values = [tensor.index_select(0, prompts) for tensor in self.prompt_values]
            self.lengths_B = self.lengths_B.index_select(0, prompts)
            self.mask = self._padding_mask()
        self._lay_out()

    def make_room(self) -> None:
        """Make sure that each row's next token has a slot."""
        capacity, most = self.keys[0].shape[2], self._response_window
        if self.slot < capacity:
            return
        larger = capacity + max(GROWTH, capacity // 4)
        larger = larger if most is None else min(larger, most)
        self.keys = self._grown(self.keys, larger)
        self.values = self._grown(self.values, larger)

    def to_grid(self, rows_S: Tensor) -> Tensor:
        """[S, ...] laid out as [B, width, ...]; places without a row are zero."""
        shape = (self.lengths_B.numel(), self.width, *rows_S.shape[1:])
        if self.place_S is None:
            return rows_S.view(shape)
        grid = rows_S.new_zeros(shape)
        grid.flatten(0, 1)[self.place_S] = rows_S
        return grid

    def from_grid(self, grid: Tensor) -> Tensor:
        """The inverse of `to_grid`."""
        rows = grid.flatten(0, 1)
        return rows if self.place_S is None else rows.index_select(0, self.place_S)

    def _grown(self, tensors: list[Tensor], capacity: int) -> list[Tensor]:
        grown = self._empty(capacity)
        for old, new in zip(tensors, grown, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        return grown

    def _empty(self, capacity: int) -> list[Tensor]:
        _, heads, _, dim = self.prompt_keys[0].shape
        shape = (self.prompt_S.numel(), heads, capacity, dim)
        return [tensor.new_empty(shape) for tensor in self.prompt_keys]

    def _lay_out(self) -> None:
        """Rows of one prompt side by side, in row order."""
        counts_B = self.prompt_S.bincount(minlength=self.lengths_B.numel())
        self.width = int(counts_B.max())
        order = self.prompt_S.argsort(stable=True)
        places = torch.arange(order.numel(), device=order.device)
        rank = places - (counts_B.cumsum(0) - counts_B).repeat_interleave(counts_B)
        place_S = self.prompt_S * self.width
        place_S[order] += rank
        plain = order.numel() == counts_B.numel() * self.width and bool((place_S == places).all())
        self.place_S: Tensor | None = None if plain else place_S

    def _padding_mask(self) -> Tensor | None:
        return self._prompt_mask(torch.zeros_like(self.lengths_B))

    def _prompt_mask(self, oldest_B: Tensor) -> Tensor | None:
        """Hides padding, and positions before each prompt's oldest; None where nothing is hidden."""
        _, heads, padded, _ = self.prompt_keys[0].shape
        position_P = torch.arange(padded, device=self.lengths_B.device)
        hidden = (position_P >= self.lengths_B[:, None]) | (position_P < oldest_B[:, None])
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(hidden.shape, dtype=self.prompt_keys[0].dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(heads, dim=0).unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A tensor of `shape` is seen as `source` and copied (broadcast) into `destination`."""

    shape: tuple[int, ...]
    source: tuple[int, ...]
    destination: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are [out, in]. `qkv`: query, key, value heads in that order; `gate_up`: gate, then up.

    `query_key_norm`: [heads + kv_heads, head_dim], or None.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_key_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def load_slots(slots: Mapping[str, Slot], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor into the slot of its name, cast to the buffer's dtype.

    Raises UserError for an unknown, repeated, wrong-shaped or missing one; buffers then mix old and new.
    """
    missing = dict.fromkeys(slots)
    for name, tensor in tensors:
        if name not in missing:
            known = "came twice" if name in slots else "is not a weight of this model"
            raise UserError(f"weights for the in-process engine: {name} {known}")
        slot = slots[name]
        if tuple(tensor.shape) != slot.shape:
            raise UserError(
                f"weights for the in-process engine: {name} has shape {tuple(tensor.shape)}, not {slot.shape}"
            )
        with torch.no_grad():
            slot.destination.copy_(tensor.detach().reshape(slot.source))
        del missing[name]
    if missing:
        named = ", ".join(list(missing)[:3])
        raise UserError(f"weights for the in-process engine: {len(missing)} missing, among them {named}")


class DecoderWeights:
    """All weights of one model, zeros until filled through `slots`; a tied `head` is the embedding itself."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture = architecture
        self._dtype = dtype
        self._device = device
        self.slots: dict[str, Slot] = {}
        vocabulary, hidden = architecture.vocab, architecture.hidden
        self.embedding = self._plain("model.embed_tokens.weight", vocabulary, hidden)
        self.layers = [self._layer(f"model.layers.{index}") for index in range(architecture.num_layers)]
        self.norm = self._plain("model.norm.weight", hidden)
        self.head = self.embedding if architecture.tied else self._plain("lm_head.weight", vocabulary, hidden)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _plain(self, name: str, *shape: int) -> Tensor:
        buffer = self._zeros(*shape)
        self._place(name, buffer)
        return buffer

    def _place(self, name: str, destination: Tensor) -> None:
        shape = tuple(destination.shape)
        self.slots[name] = Slot(shape, shape, destination)

    def _place_interleaved(self, name: str, destination: Tensor) -> None:
        """`destination`: rows of whole query or key heads; see the module's docstring."""
        dim = self._architecture.head_dim
        heads, rest = destination.shape[0] // dim, tuple(destination.shape[1:])
        halves = destination.view(heads, dim // 2, 2, *rest).transpose(1, 2)
        self.slots[name] = Slot(tuple(destination.shape), tuple(halves.shape), halves)

    def _place_head_norm(self, name: str, destination: Tensor) -> None:
        """`destination`: [heads, head_dim]; the one vector goes to every head."""
        heads, dim = destination.shape
        halves = destination.view(heads, dim // 2, 2).transpose(1, 2)
        self.slots[name] = Slot((dim,), (2, dim // 2), halves)

    def _layer(self, prefix: str) -> LayerWeights:
        a = self._architecture
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        gate_up = self._zeros(2 * a.ffn, a.hidden)
        for part, name in zip(gate_up.chunk(2), ("gate_proj", "up_proj"), strict=True):
            self._place(f"{mlp}.{name}.weight", part)
        return LayerWeights(
            input_norm=self._plain(f"{prefix}.input_layernorm.weight", a.hidden),
            qkv=self._qkv(attention, "weight", a.hidden),
            qkv_bias=self._qkv(attention, "bias") if a.qkv_bias else None,
            query_key_norm=self._query_key_norm(attention) if a.qk_norm else None,
            output=self._plain(f"{attention}.o_proj.weight", a.hidden, a.heads * a.head_dim),
            post_norm=self._plain(f"{prefix}.post_attention_layernorm.weight", a.hidden),
            gate_up=gate_up,
            down=self._plain(f"{mlp}.down_proj.weight", a.hidden, a.ffn),
        )

    def _qkv(self, attention: str, kind: str, *columns: int) -> Tensor:
        a = self._architecture
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        fused = self._zeros(queries + 2 * keys, *columns)
        query, key, value = fused.tensor_split([queries, queries + keys])
        self._place_interleaved(f"{attention}.q_proj.{kind}", query)
        self._place_interleaved(f"{attention}.k_proj.{kind}", key)
        self._place(f"{attention}.v_proj.{kind}", value)
        return fused

    def _query_key_norm(self, attention: str) -> Tensor:
        a = self._architecture
        fused = self._zeros(a.heads + a.kv_heads, a.head_dim)
        query, key = fused.tensor_split([a.heads])
        self._place_head_norm(f"{attention}.q_norm.weight", query)
        self._place_head_norm(f"{attention}.k_norm.weight", key)
        return fused


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Positions whose rotations are computed at first; more when a sequence gets there.
FIRST_POSITIONS = 128


class Decoder:
    """Next-token logits from `weights`. `prefill` opens a cache, `step` moves it on by one token per row.

    With a `response_window` W a token sees the whole prompt and, of what follows it, the last W tokens, itself among
    them. No layer may have a window of its own then.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        response_window: int | None = None,
    ) -> None:
        assert response_window is None or architecture.smallest_window is None, "refused with the run's file"
        self._response_window = response_window
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
        return hidden, KeyValueCache(keys, values, lengths_B, self._response_window)

    def step(self, tokens_S: Tensor, cache: KeyValueCache) -> Tensor:
        """Append `tokens_S` (int64, one per row of `cache`); returns the logits that follow, [S, V]."""
        cache.make_room()
        views = {window: cache.view(window) for window in set(self._windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.keys[layer][:, :, cache.slot] = key
            cache.values[layer][:, :, cache.slot] = value
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
        keys = cache.keys[layer][:, :, view.first : cache.filled].flatten(0, 1)
        values = cache.values[layer][:, :, view.first : cache.filled].flatten(0, 1)
        queries = query.reshape(-1, repeat, a.head_dim)
        # Each row's own tokens: one product per (row, key-value head).
        own = _scores(queries, keys, None)
        # The prompt: one product for all rows that read it.
        grid = _group_major(cache, queries.view(rows, a.kv_heads, repeat, -1))
        shared = _scores(grid, cache.prompt_keys[layer].flatten(0, 1), view.mask)
        shared = _row_major(cache, shared, a.kv_heads).reshape(*own.shape[:2], -1)
        # One softmax over both, then both sums of values by the same grouping.
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
