"""An engine's weights under their Hugging Face names: what it holds, as the trainer would have sent it.

SGLang fuses projections, cuts matrices over ranks and pads the vocabulary. A `Slot` undoes that for one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasharp.protocols import MEMORY_PREFIX
from megasharp.serving.borrowing import Goal
from megasharp.serving.checksum import checksum
from megasharp.serving.engine.seams import (
    LlamaForCausalLM,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_parallel,
    tensor_model_parallel_all_gather,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a checkpoint and where it lies on this rank: rows `[start, start + size)` of `parameter`.

    `cut` is the dimension in which ranks hold parts, None where each holds all; `copies` neighbouring ranks hold the
    same part. `rows`: how many rows the whole tensor has; ranks together may hold more, as padding.
    """

    name: str
    parameter: Tensor
    start: int
    size: int
    rows: int
    cut: int | None = None
    copies: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, as a checkpoint has it."""
        rest = list(self.parameter.shape[1:])
        if self.cut == 1:
            rest[0] *= get_parallel().tp_size
        return (self.rows, *rest)

    def whole(self) -> Tensor:
        """The whole tensor; every rank must call it in the same order."""
        part = self.parameter.detach()[self.start : self.start + self.size].contiguous()
        if self.cut is not None and get_parallel().tp_size > 1:
            part = tensor_model_parallel_all_gather(part, dim=self.cut)
            if self.copies > 1:
                part = torch.cat(part.split(self.size)[:: self.copies])
        return part[: self.rows]

    def goal(self) -> Goal:
        """Where on this rank its part of the whole tensor lies."""
        part = self.parameter.detach()[self.start : self.start + self.size]
        if self.cut is None:
            return Goal(part, 0, 0, self.shape)
        number = get_parallel().tp_rank // self.copies
        if self.cut == 1:
            return Goal(part, 1, number * part.shape[1], self.shape)
        first = number * self.size
        real = max(0, min(self.size, self.rows - first))
        return Goal(part[:real], 0, first, self.shape, part[real:] if real < self.size else None)


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Every tensor that an update of `model` may name, by that name, the memory's under their prefix.

    Raises ValueError for a model, or a quantisation, whose layout is not known here.
    """
    memory = getattr(model, "memory", None)
    slots = {slot.name: slot for slot in _slots(model, "")}
    if memory is not None:
        slots |= {slot.name: slot for slot in _slots(memory, MEMORY_PREFIX)}
    return slots


def goals_of(model: nn.Module) -> dict[str, Goal]:
    """Where an update of `model` is to lie on this rank, by the checkpoint's names. Raises ValueError as `slots_of`."""
    return {name: slot.goal() for name, slot in slots_of(model).items()}


def checksums(model: nn.Module) -> dict[str, str]:
    """Checksums of every whole tensor by its name, as `megasharp.serving.checksum` gives them for what was sent.

    Equal only where the sender sent the engine's own dtype. Every rank must call it.
    """
    return {name: checksum(slot.whole()) for name, slot in slots_of(model).items()}


def known(model: nn.Module) -> bool:
    """Whether `slots_of` knows the model's family."""
    return isinstance(model, LlamaForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM)


def _slots(network: nn.Module, prefix: str) -> Iterator[Slot]:
    if not known(network):
        raise ValueError(f"the layout of {type(network).__name__} is not known to megasharp")
    for name, parameter in network.named_parameters():
        owner, _, kind = name.rpartition(".")
        if not prefix and name.startswith(MEMORY_PREFIX):
            continue
        if kind not in ("weight", "bias"):
            raise ValueError(f"{name}: quantised weights have no checkpoint's layout")
        yield from _slots_of_layer(network.get_submodule(owner), prefix + owner, kind, parameter)


def _slots_of_layer(layer: Any, owner: str, kind: str, parameter: Tensor) -> Iterator[Slot]:
    """The checkpoint's tensors that lie in one parameter."""
    if isinstance(layer, QKVParallelLinear):
        yield from _query_key_value(layer, owner, kind, parameter)
    elif isinstance(layer, MergedColumnParallelLinear):
        half, whole = parameter.shape[0] // 2, layer.output_sizes[0]
        stem = owner.removesuffix("gate_up_proj")
        yield Slot(f"{stem}gate_proj.{kind}", parameter, 0, half, whole, cut=0)
        yield Slot(f"{stem}up_proj.{kind}", parameter, half, half, whole, cut=0)
    elif isinstance(layer, VocabParallelEmbedding):
        rows = parameter.shape[0]
        yield Slot(f"{owner}.{kind}", parameter, 0, rows, layer.org_vocab_size, cut=0)
    else:
        rows = parameter.shape[0]
        by_columns = isinstance(layer, RowParallelLinear) and kind == "weight"
        yield Slot(f"{owner}.{kind}", parameter, 0, rows, rows, cut=1 if by_columns else None)


def _query_key_value(layer: Any, owner: str, kind: str, parameter: Tensor) -> Iterator[Slot]:
    stem = owner.removesuffix("qkv_proj")
    queries, keys = layer.q_proj_shard_size, layer.kv_proj_shard_size
    query_rows, key_rows = layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size
    copies = layer.num_kv_head_replicas
    yield Slot(f"{stem}q_proj.{kind}", parameter, 0, queries, query_rows, cut=0)
    yield Slot(f"{stem}k_proj.{kind}", parameter, queries, keys, key_rows, cut=0, copies=copies)
    yield Slot(f"{stem}v_proj.{kind}", parameter, queries + keys, keys, key_rows, cut=0, copies=copies)
