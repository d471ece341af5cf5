"""One Megatron parameter at a time: filled from a Hugging Face checkpoint, or turned back into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.mapping import Rule, Shard


@dataclass(frozen=True, slots=True)
class TensorView:
    """A contiguous part of the whole Hugging Face tensor `name` in the memory of a rank's parameter.

    Its values begin at index `start` in dimension `dim`; all other dimensions are whole.
    """

    name: str
    dim: int
    start: int
    values: Tensor


class TensorReader(Protocol):
    """Anything that gives whole Hugging Face tensors by name; `HFReader` is one."""

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`."""
        ...


def megatron_tensor(
    reader: TensorReader,
    family: Family,
    arch: Architecture,
    name: str,
    tp_rank: int,
    tp_size: int,
    vocab_multiple: int = 1,
) -> Tensor:
    """One rank's value of the Megatron parameter `name` (global layer number), in the checkpoint's dtype.

    Contiguous and in memory of its own. Vocabulary rows are padded with zeros to
    `padded_vocab(arch.vocab, tp_size, vocab_multiple)`.

    Raises:
        KeyError: the model has no such parameter.
        UserError: the checkpoint cannot be read.
    """
    rule, layer = family.rule_for(arch, name)
    tensors = [reader.tensor(hf_name.format(layer=layer)) for hf_name in rule.hf]
    return rule.shard(tensors, arch, Shard(tp_rank, tp_size, vocab_multiple))


def hf_tensors(family: Family, arch: Architecture, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors that the Megatron parameter `name` (global layer number) stands for.

    `shards` are all tensor-parallel ranks' values in rank order; of a replicated parameter one suffices.
    A tied model's `output_layer.weight` gives none. The result may share memory with `shards`.

    Raises:
        KeyError: the model has no such parameter.
    """
    rule, layer = family.rule_for(arch, name)
    if not rule.exported:
        return []
    merged = rule.merge(shards, arch)
    for tensor, shape in zip(merged, rule.shapes, strict=True):
        assert tuple(tensor.shape) == arch.shape(shape), f"{name}: {tuple(tensor.shape)}"
    return [(hf_name.format(layer=layer), tensor) for hf_name, tensor in zip(rule.hf, merged, strict=True)]


def hf_views(family: Family, arch: Architecture, name: str, parameter: Tensor, part: Shard) -> Iterator[TensorView]:
    """What of Hugging Face tensors lies in one rank's contiguous Megatron parameter `name` (global layer number).

    A tied model's `output_layer.weight` gives nothing. Raises KeyError where the model has no such parameter.
    """
    rule, layer = family.rule_for(arch, name)
    if rule.exported:
        names = [hf_name.format(layer=layer) for hf_name in rule.hf]
        for view in rule.views(parameter, arch, part):
            yield TensorView(names[view.number], view.dim, view.start, view.values)


def expected_hf_shapes(family: Family, arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a model's checkpoint; a tied one has no lm_head.weight."""
    return {
        hf_name.format(layer=layer): arch.shape(shape)
        for rule in family.present(arch)
        if rule.exported
        for hf_name, shape in zip(rule.hf, rule.shapes, strict=True)
        for layer in _layers(rule, arch)
    }


def _layers(rule: Rule, arch: Architecture) -> range:
    return range(arch.num_layers if "{layer}" in rule.megatron else 1)
