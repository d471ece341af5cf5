"""The decoder's weights in fused buffers, and the table of where each Hugging Face tensor goes in them.

Query and key rows are stored with the halves of each head interleaved (dimension `i` next to
`i + head_dim / 2`): a rotary rotation is then one complex multiplication, and the products of queries with
keys do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.errors import UserError


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
        _copy(name, slots[name], tensor)
        del missing[name]
    if missing:
        named = ", ".join(list(missing)[:3])
        raise UserError(f"weights for the in-process engine: {len(missing)} missing, among them {named}")


def _copy(name: str, slot: Slot, tensor: Tensor) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise UserError(f"weights for the in-process engine: {name} has shape {tuple(tensor.shape)}, not {slot.shape}")
    with torch.no_grad():
        slot.destination.copy_(tensor.detach().reshape(slot.source))


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
