"""Fill a learner with its first weights and hand its weights out as Hugging Face tensors, under any TP x PP.

First weights come from a Hugging Face folder or from Megatron's shards, or are drawn. The two folders give every
parameter or raise, and refuse weights that are not finite in the learner's dtype.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import dtype_name
from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.families.family import is_of_expert
from megasharp.convert.hf_folder import (
    HFReader,
    TensorReader,
    TensorView,
    expected_hf_shapes,
    hf_tensors,
    hf_views,
    megatron_tensor,
    read_config,
)
from megasharp.convert.lora import is_adapter
from megasharp.convert.mapping import Shard
from megasharp.convert.model_folder import ModelFolder, model_folder
from megasharp.convert.record import is_finite
from megasharp.learner.adapters import adapted_weights
from megasharp.learner.layer_spec import local_name
from megasharp.learner.parallel import Place
from megasharp.learner.sharded_state import load_base

# The beginning of a decoder layer's parameter names, with the layer's number: of a chunk, or of the whole model.
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def global_parameters(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of this rank's chunks by their names in the local layer spec.

    Numbers of layers and experts are those of the whole model.
    """
    for chunk in chunks:
        layers = chunk.decoder.layers
        for own, parameter in chunk.named_parameters():
            name = local_name(own)
            found = LAYER.match(name)
            if found is None:
                yield name, parameter
                continue
            layer = layers[int(found[1])]
            rest = name[found.end() :]
            first = layer.mlp.local_expert_indices[0] if is_of_expert(name) else 0
            yield f"decoder.layers.{layer.layer_number - 1}.{_moved(rest, first)}", parameter


@torch.no_grad()
def load_hf(chunks: Sequence[GPTModel], reader: TensorReader, family: Family, arch: Architecture, place: Place) -> None:
    """Fill this rank's parameters, one tensor at a time, cast to their dtype; adapters keep their initial values.

    Raises UserError where a file cannot be read.
    """
    for name, parameter in global_parameters(chunks):
        if is_adapter(name):
            continue
        part = _part(name, place)
        shard = megatron_tensor(reader, family, arch, name, part.rank, part.count)
        assert shard.shape == parameter.shape, f"{name}: {tuple(shard.shape)} for {tuple(parameter.shape)}"
        parameter.copy_(shard.to(parameter.dtype))


@torch.no_grad()
def export_stage(
    chunks: Sequence[GPTModel], family: Family, arch: Architecture, place: Place, everywhere: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield this stage's weights as whole Hugging Face tensors, on the ranks where `place.exports`, or `everywhere`.

    Adapters are merged into the weights that leave; the model's own stay as they are.

    Every rank of the first copy must iterate to the end, because shards are gathered; others yield nothing. With
    `everywhere` all ranks must iterate and all yield, and tensors may be the parameters' own memory. Experts of one
    number come from all expert-parallel ranks at once.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_and_model_parallel_group()
    adapted = dict(adapted_weights(chunks))
    for name, parameter in global_parameters(chunks):
        of_expert = is_of_expert(name)
        takes_part = place.first_copy_of_experts if of_expert else place.first_copy
        if is_adapter(name) or not (takes_part or everywhere):
            continue
        if parameter in adapted:
            value = adapted[parameter].merged_weight()
        else:
            value = parameter.detach()
            if not everywhere and not parameter.is_cuda:
                # In memory of its own: the receiver may make a NumPy array of it, and torch then never again empties
                # its storage, which offloading does to parameters.
                value = value.clone()
        cut = of_expert or getattr(parameter, "tensor_model_parallel", False)
        shards = _gathered(value, expert_group if of_expert else group) if cut else [value]
        if place.exports or everywhere:
            # Behind an expert-parallel rank's experts are the next rank's.
            ranks = parallel_state.get_expert_model_parallel_world_size() if of_expert else 1
            experts, width = (arch.experts.count if arch.experts else 0) // ranks, len(shards) // ranks
            for number in range(ranks):
                own = _moved(name, (number - place.ep) * experts)
                yield from hf_tensors(family, arch, own, shards[number * width : (number + 1) * width])


def weight_views(
    chunks: Sequence[GPTModel], family: Family, arch: Architecture, place: Place
) -> list[TensorView] | None:
    """Return this rank's weights as parts of Hugging Face tensors, in the parameters' own memory.

    None with adapters, which must be merged into weights that leave.
    """
    views: list[TensorView] = []
    for name, parameter in global_parameters(chunks):
        if is_adapter(name):
            return None
        views += hf_views(family, arch, name, parameter.detach(), _part(name, place))
    return views


def _part(name: str, place: Place) -> Shard:
    """Return this rank's part of a parameter among the ranks that share it."""
    if is_of_expert(name):
        return Shard(place.etp, parallel_state.get_expert_tensor_parallel_world_size())
    return Shard(place.tp, parallel_state.get_tensor_model_parallel_world_size())


def _moved(name: str, by: int) -> str:
    """Return the name of the parameter of an expert whose number is larger `by` this; other names as they are."""
    return _EXPERT.sub(lambda number: str(int(number[0]) + by), name)


def _gathered(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather the values of all ranks, in their order."""
    if dist.get_world_size(group) == 1:
        return [value]
    shards = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, value.contiguous(), group=group)
    return shards


# Without them Megatron takes the folder for another kind of checkpoint.
_BESIDE_SHARDS = ("metadata.json", "common.pt")
_WHY = "no loss would be a number"
# Standard deviation of an untrained model's matrices: initializer_range of every family here.
_COLD_STD = 0.02


class FirstWeights(Protocol):
    """A source of weights, with the model's family and architecture."""

    family: Family
    architecture: Architecture

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Fill this rank's parameters, cast to their dtype; adapters keep their values. All ranks must call it.

        Raises:
            UserError: the weights cannot be read, or are not finite.
        """
        ...


@contextmanager
def first_weights(folder: str | Path, drawn: bool = False, cold: int | None = None) -> Iterator[FirstWeights]:
    """Open the weights of a folder of either kind, or draw new ones for the model that the folder describes.

    `drawn` draws fast, by each rank for itself; the seed `cold` gives a model the same weights under every layout.

    Raises:
        UserError: it is no model's folder, or is damaged.
    """
    model = model_folder(Path(folder))
    if drawn:
        yield _Drawn(model)
    elif cold is not None:
        yield _Cold(model, cold)
    elif model.is_megatron:
        yield _Shards(model)
    else:
        with HFReader(model.path) as reader:
            yield _HuggingFace(reader)


def check_beside_shards(folder: Path) -> None:
    """Check the files that Megatron reads before its shards, which a conversion can do without.

    Raises:
        UserError: one of them is lost.
    """
    for name in _BESIDE_SHARDS:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: these weights cannot be loaded: {name} is missing, copy the whole folder")


class _HuggingFace:
    """A checked Hugging Face folder; every rank reads whole tensors and keeps its part."""

    def __init__(self, reader: HFReader) -> None:
        self._reader = reader
        self.family, self.architecture = reader.family, reader.architecture

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Fill one tensor at a time."""
        load_hf(chunks, self._reader, self.family, self.architecture, place)
        not_finite = _first_not_finite(chunks)
        if not_finite is None:
            return
        parameter, dtype = not_finite
        rule, at = self.family.rule_for(self.architecture, parameter)
        names = [at.name(name) for name in rule.hf]
        # Where all are finite as they are stored, it is the learner's dtype that is too short.
        name = next((name for name in names if not is_finite(self._reader.tensor(name))), None)
        if name is not None:
            raise UserError(f"{self._reader.file(name)}: tensor {name} holds NaN or infinite values: {_WHY}")
        where = f"{self._reader.file(names[0])}: tensor {' or '.join(names)}"
        raise UserError(
            f"{where} holds values that are too large for {dtype_name(dtype)}: set model.dtype to a wider one"
        )


class _Shards:
    """torch_dist shards; Megatron reads of them what each rank needs."""

    def __init__(self, model: ModelFolder) -> None:
        self._folder = model.weights
        check_beside_shards(self._folder)
        _, self.family, self.architecture = read_config(model.description)

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Fill all at once, by Megatron's distributed checkpointing."""
        try:
            load_base(self._folder, chunks)
        except UserError:
            raise
        # The exceptions of torch and Megatron for damaged shards have no common base class.
        except Exception as error:
            raise UserError(f"{self._folder}: these weights cannot be loaded: {one_line(error)}") from error
        not_finite = _first_not_finite(chunks)
        if not_finite is not None:
            name, dtype = not_finite
            values = f"values that are NaN, infinite or too large for {dtype_name(dtype)}"
            raise UserError(f"{self._folder}: tensor {name} holds {values}: {_WHY}")


class _Drawn:
    """The weights of an untrained model: matrices of `_COLD_STD`, norms of 1, biases of 0.

    For benchmarks: ranks draw on their own devices, each its own numbers, so that the model depends on the layout.
    """

    def __init__(self, model: ModelFolder) -> None:
        _, self.family, self.architecture = read_config(model.description)

    @torch.no_grad()
    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Draw in place; adapters keep their values."""
        for name, parameter in global_parameters(chunks):
            if is_adapter(name):
                continue
            if parameter.dim() > 1:
                parameter.normal_(0.0, _COLD_STD)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class _Cold:
    """The weights of an untrained model, as `_Drawn`'s: every rank draws whole tensors by name and keeps its part."""

    def __init__(self, model: ModelFolder, seed: int) -> None:
        _, self.family, self.architecture = read_config(model.description)
        self._shapes = expected_hf_shapes(self.family, self.architecture)
        self._seed = seed

    def tensor(self, name: str) -> Tensor:
        """Return the Hugging Face tensor `name`, float32 on the CPU, whatever devices ranks have."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape, device="cpu") if name.endswith("bias") else torch.ones(shape, device="cpu")
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.empty(shape, device="cpu").normal_(0.0, _COLD_STD, generator=generator)

    def fill(self, chunks: Sequence[GPTModel], place: Place) -> None:
        """Fill one tensor at a time; adapters keep their values."""
        load_hf(chunks, self, self.family, self.architecture, place)


def _first_not_finite(chunks: Sequence[GPTModel]) -> tuple[str, torch.dtype] | None:
    """Return the global name and dtype of this rank's first parameter that is not finite throughout."""
    for name, parameter in global_parameters(chunks):
        if not is_adapter(name) and not is_finite(parameter.detach()):
            return name, parameter.dtype
    return None
