"""Weights in from a Hugging Face folder, and out as Hugging Face tensors, under any TP x PP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.hf_folder import HFReader
from megasharp.convert.lora import is_adapter
from megasharp.convert.mapping import Shard
from megasharp.convert.shards import TensorView, hf_tensors, hf_views, megatron_tensor
from megasharp.mcore.layer_spec import local_name
from megasharp.mcore.lora import adapted_weights
from megasharp.mcore.parallel import Place

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def global_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank's chunks by their names in the local layer spec, with global layer numbers."""
    for chunk in chunks:
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for own, parameter in chunk.named_parameters():
            name = local_name(own)
            layer = _LOCAL_LAYER.match(name)
            yield (f"decoder.layers.{numbers[layer[1]]}.{name[layer.end() :]}" if layer else name), parameter


@torch.no_grad()
def load_hf(chunks: Sequence[GPTModel], reader: HFReader, family: Family, arch: Architecture, place: Place) -> None:
    """Fill this rank's parameters, one tensor at a time, cast to their dtype; adapters keep their initial values."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in global_parameters(chunks):
        if is_adapter(name):
            continue
        shard = megatron_tensor(reader, family, arch, name, place.tp, tp)
        assert shard.shape == parameter.shape, f"{name}: {tuple(shard.shape)} for {tuple(parameter.shape)}"
        parameter.copy_(shard.to(parameter.dtype))


@torch.no_grad()
def export_stage(
    chunks: Sequence[GPTModel], family: Family, arch: Architecture, place: Place, everywhere: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield this stage's weights as whole Hugging Face tensors, on the ranks where `place.exports`, or `everywhere`.

    Adapters are merged into the weights that leave; those of the model stay.

    Every rank of the data-parallel rank 0 must iterate to the end, because shards are gathered; others yield nothing.
    Everywhere, all ranks must and do, and may get the parameters' own memory.
    """
    if not place.first_copy and not everywhere:
        return
    group = parallel_state.get_tensor_model_parallel_group()
    adapted = dict(adapted_weights(chunks))
    for name, parameter in global_parameters(chunks):
        if is_adapter(name):
            continue
        if parameter in adapted:
            value = adapted[parameter].merged_weight()
        else:
            value = parameter.detach() if everywhere else _apart(parameter)
        shards = _gather_shards(value, parameter, group)
        if place.exports or everywhere:
            yield from hf_tensors(family, arch, name, shards)


def weight_views(
    chunks: Sequence[GPTModel], family: Family, arch: Architecture, place: Place
) -> list[TensorView] | None:
    """This rank's weights as parts of Hugging Face tensors in the parameters' own memory.

    None where they do not lie there: adapters are merged into what leaves.
    """
    part = Shard(place.tp, parallel_state.get_tensor_model_parallel_world_size())
    views: list[TensorView] = []
    for name, parameter in global_parameters(chunks):
        if is_adapter(name):
            return None
        views += hf_views(family, arch, name, parameter.detach(), part)
    return views


def _apart(parameter: torch.nn.Parameter) -> Tensor:
    """The parameter's value, on a CPU in memory of its own.

    Whoever gets it may make a NumPy array of it, and torch then never again lets its storage be emptied, which
    offloading does to parameters.
    """
    return parameter.detach() if parameter.is_cuda else parameter.detach().clone()


def _gather_shards(value: Tensor, parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> list[Tensor]:
    """All tensor-parallel parts in rank order; just this one where the parameter is replicated."""
    if dist.get_world_size(group) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return [value]
    shards = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, value.contiguous(), group=group)
    return shards
