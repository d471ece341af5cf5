"""A compact decoder for every model family: prompts once, then one token per row and step, against a cache.

It is written for small models, where the cost is many small operations: fused projections, one complex multiplication
for the rotary embedding. What a mixture of experts has in place of an MLP is in `expert_layer.py`.

The cache (`cache.py`) has one copy per prompt, and blocks for what each row drew since. The samples of a group share
their prompt's part, so a step reads each prompt once however many samples it has. With 48 prompts of 150 tokens and 8
samples each this took three quarters of the time of a cache that copies the prompt into every row; with prompts of 14
tokens the two were equal (one core).

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
from megasharp.convert.architecture import Architecture, Experts
from megasharp.convert.rope import rotary_frequencies
from megasharp.ops.chunked_head import choose_linear
from megasharp.rollout.inprocess.cache import KeyValueCache
from megasharp.rollout.inprocess.expert_layer import ExpertWeights, Mixture, expert_names, router_name
from megasharp.rollout.inprocess.step_attention import attend_step


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A tensor of `shape` is seen as `source` and copied (broadcast) into `destination`."""

    shape: tuple[int, ...]
    source: tuple[int, ...]
    destination: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MLPWeights:
    """Matrices are [out, in]. `gate_up`: gate, then up."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are [out, in]. `qkv`: query, key, value heads in that order.

    `query_key_norm`: [heads + kv_heads, head_dim], or None. The norms of attention and MLP are before or behind them,
    as the architecture says.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_key_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    mlp: MLPWeights | ExpertWeights


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
        self.layers = [self._layer(index) for index in range(architecture.num_layers)]
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

    def _layer(self, layer: int) -> LayerWeights:
        a, prefix = self._architecture, f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        norms = ("post_attention", "post_feedforward") if a.post_norm else ("input", "post_attention")
        attention_norm, mlp_norm = (self._plain(f"{prefix}.{name}_layernorm.weight", a.hidden) for name in norms)
        return LayerWeights(
            attention_norm=attention_norm,
            qkv=self._qkv(attention, "weight", a.hidden),
            qkv_bias=self._qkv(attention, "bias") if a.qkv_bias else None,
            query_key_norm=self._query_key_norm(attention) if a.qk_norm or a.qk_norm_whole else None,
            output=self._plain(f"{attention}.o_proj.weight", a.hidden, a.heads * a.head_dim),
            mlp_norm=mlp_norm,
            mlp=self._mlp(f"{prefix}.mlp") if a.experts is None else self._mixture(layer, a.experts),
        )

    def _mlp(self, prefix: str) -> MLPWeights:
        a = self._architecture
        gate_up = self._zeros(2 * a.ffn, a.hidden)
        for part, name in zip(gate_up.chunk(2), ("gate_proj", "up_proj"), strict=True):
            self._place(f"{prefix}.{name}.weight", part)
        return MLPWeights(gate_up, self._plain(f"{prefix}.down_proj.weight", a.hidden, a.ffn))

    def _mixture(self, layer: int, experts: Experts) -> ExpertWeights:
        a = self._architecture
        gate_up = self._zeros(experts.count, 2 * experts.ffn, a.hidden)
        down = self._zeros(experts.count, a.hidden, experts.ffn)
        for expert in range(experts.count):
            names = expert_names(a, layer, expert)
            for name, part in zip(names, (*gate_up[expert].chunk(2), down[expert]), strict=True):
                self._place(name, part)
        return ExpertWeights(self._plain(router_name(a, layer), experts.count, a.hidden), gate_up, down)

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
        for name, part in zip(("q_norm", "k_norm"), fused.tensor_split([a.heads]), strict=True):
            if a.qk_norm_whole:
                self._place_interleaved(f"{attention}.{name}.weight", part.view(-1))
            else:
                self._place_head_norm(f"{attention}.{name}.weight", part)
        return fused


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Positions whose rotations are computed at first; more when a sequence gets there.
FIRST_POSITIONS = 128


class Decoder:
    """Next-token logits from `weights`. `prefill` adds prompts to a cache, `step` moves it on by one token per row.

    With a `response_window` W a token sees the whole prompt and, of what follows it, the last W tokens, itself among
    them. No layer may have a window of its own then. With `records_experts` a mixture of experts says where it sent
    each token.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        response_window: int | None = None,
        records_experts: bool = False,
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
        self._mixture = Mixture(architecture.experts, dtype, device) if architecture.experts else None
        self._recorded = architecture.routing if records_experts else None

    def new_cache(self) -> KeyValueCache:
        """Return a cache without prompts and rows."""
        a = self.architecture
        return KeyValueCache(a.num_layers, a.kv_heads, a.head_dim, self.weights.embedding, self._response_window)

    def prefill(self, prompts: Sequence[Sequence[int]], cache: KeyValueCache) -> tuple[Tensor, list[Tensor] | None]:
        """Read prompts, and put them behind those of `cache`.

        Returns the logits after each, [B, V], and each one's experts [prompt, layers, per_token], where recorded.
        """
        hidden, keys, values, routed = self._read(prompts)
        cache.prompts.add(keys, values, [len(prompt) for prompt in prompts])
        padded = keys[0].shape[2]
        last = torch.tensor([place * padded + len(prompt) - 1 for place, prompt in enumerate(prompts)])
        experts = None
        if routed is not None:
            texts = torch.split(routed, padded)
            experts = [text[: len(prompt)].clone() for text, prompt in zip(texts, prompts, strict=True)]
        return self._logits(hidden.index_select(0, last.to(self.device))), experts

    def read(self, tokens: Sequence[int], first: int, rows: int) -> Iterator[Tensor]:
        """The logits that predict tokens `first` (at least 1) and later of one text, at most [`rows`, V] at a time."""
        hidden, *_ = self._read([tokens])
        for part in torch.split(hidden[first - 1 : -1], rows):
            yield self._logits(part)

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
        """Final hidden states [B * padded length, H] before the last norm, by layer keys and values, and experts."""
        padded = max(map(len, prompts))
        tokens = torch.tensor([[*prompt, *([0] * (padded - len(prompt)))] for prompt in prompts], device=self.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        masks = {window: _band(padded, window, self.device) for window in set(self._windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # [B * padded, n, head_dim] as [B, n, padded, head_dim]; causal attention hides padding on the right.
            query, key, value = (
                part.reshape(-1, padded, *part.shape[1:]).transpose(1, 2).contiguous() for part in (query, key, value)
            )
            keys.append(key)
            values.append(value)
            mask = masks[self._windows[layer]]
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

        positions = torch.arange(padded, device=self.device).repeat(len(prompts))
        hidden, routed = self._hidden(tokens.flatten(), positions, padded, attend)
        return hidden, keys, values, routed

    def step(self, tokens_S: Tensor, cache: KeyValueCache) -> tuple[Tensor, Tensor | None]:
        """Append `tokens_S` (int64, one per row of `cache`).

        Returns the logits that follow, [S, V], and the tokens' experts [S, layers, per_token], where recorded.
        """
        step = cache.next_step(set(self._windows))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.write(layer, step, key, value)
            return attend_step(cache, step, layer, query, step.views[self._windows[layer]])

        hidden, routed_SLK = self._hidden(tokens_S, step.positions_S, step.highest, attend)
        cache.lengths_S += 1
        return self._logits(hidden), routed_SLK

    def _hidden(
        self, tokens_T: Tensor, positions_T: Tensor, highest: int, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states [T, H] before the last norm, and experts, where recorded.

        Positions are below `highest`.
        """
        if highest > self._rotations.shape[0]:
            self._rotations = _rotations(self.architecture, 2 * highest, self._dtype, self.device)
        rotation_T = self._rotations.index_select(0, positions_T).unsqueeze(1)
        hidden = F.embedding(tokens_T, self.weights.embedding)
        routed: list[Tensor] = []
        for index, layer in enumerate(self.weights.layers):
            normed = self._before(hidden, layer.attention_norm)
            mixed = attend(index, *self._query_key_value(layer, normed, rotation_T))
            hidden = self._behind(self._linear(mixed, layer.output, None), layer.attention_norm).add_(hidden)
            normed = self._before(hidden, layer.mlp_norm)
            if isinstance(layer.mlp, MLPWeights):
                made = self._mlp(normed, layer.mlp)
            else:
                assert self._mixture is not None
                made, chosen_TK = self._mixture(normed, layer.mlp)
                routed.append(chosen_TK)
            hidden = self._behind(made, layer.mlp_norm).add_(hidden)
        recorded = self._recorded
        return hidden, None if recorded is None else torch.stack(routed, dim=1).to(recorded.dtype)

    def _mlp(self, rows: Tensor, mlp: MLPWeights) -> Tensor:
        gate, up = self._linear(rows, mlp.gate_up, None).chunk(2, dim=-1)
        return self._linear(F.silu(gate).mul_(up), mlp.down, None)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._linear(self._norm(hidden, self.weights.norm), self.weights.head, None)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.architecture.norm_eps)

    def _before(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Norm the input of attention or the MLP, where norms are before them."""
        return hidden if self.architecture.post_norm else self._norm(hidden, weight)

    def _behind(self, output: Tensor, weight: Tensor) -> Tensor:
        """Norm their output, where norms are behind them; in memory of its own."""
        return self._norm(output, weight) if self.architecture.post_norm else output

    def _query_key_value(
        self, layer: LayerWeights, normed: Tensor, rotation_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim] and keys, and values [T, kv_heads, head_dim]."""
        a = self.architecture
        fused = self._linear(normed, layer.qkv, layer.qkv_bias).view(-1, a.heads + 2 * a.kv_heads, a.head_dim)
        query_key, value = fused.tensor_split([a.heads + a.kv_heads], dim=1)
        if a.qk_norm_whole:
            assert layer.query_key_norm is not None
            parts = (both.tensor_split([a.heads], dim=-2) for both in (query_key, layer.query_key_norm))
            query_key = torch.cat([self._norm(*pair) for pair in zip(*parts, strict=True)], dim=1)
        elif layer.query_key_norm is not None:
            query_key = F.rms_norm(query_key, (a.head_dim,), None, a.norm_eps).mul_(layer.query_key_norm)
        query, key = _rotate(query_key, rotation_T).tensor_split([a.heads], dim=1)
        return query, key, value


def _band(count: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [count, count]: which positions each of `count` sees; None where plain causal attention says the same."""
    if window is None or window >= count:
        return None
    ones = torch.ones(count, count, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


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
