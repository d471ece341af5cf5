"""How a model's torch_dist checkpoint is cut: which part of which parameter lies where in which stored tensor.

Megatron stores parameters of all layers as one tensor with the layer in front, and a gated MLP's gate and up rows as
two pieces. The stored tensors are the same for every TP x PP; only the boundaries of their pieces differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megasharp.mcore.state import METADATA


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of a parameter's rows (`axis` 0) or columns (1), whole in every other dimension.

    `parameter` is the Megatron name with its global layer number, `first` where the piece begins in it and `shape` its
    size. In the checkpoint it lies at `offset` of the stored tensor `key`, which has the shape `whole`; a stored tensor
    may have dimensions before the parameter's own (the layer).
    """

    parameter: str
    axis: int
    first: int
    shape: tuple[int, ...]
    key: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """`shape` with the stored tensor's leading dimensions, in which a piece has length 1."""
        return (1,) * (len(self.whole) - len(self.shape)) + self.shape

    def of(self, parameter: Tensor) -> Tensor:
        """This piece of the whole parameter: a view."""
        return parameter.narrow(self.axis, self.first, self.shape[self.axis])

    def split(self, axis: int, count: int) -> Iterator[Piece]:
        """The same in `count` runs along `axis`; the last is shorter where they are not equal."""
        assert axis == self.axis or self.first == 0, "a piece is a run along one dimension"
        step = -(-self.shape[axis] // count)
        leading = len(self.whole) - len(self.shape)
        for start in range(0, self.shape[axis], step):
            shape, offset = list(self.shape), list(self.offset)
            shape[axis] = min(step, shape[axis] - start)
            offset[leading + axis] += start
            first = (self.first if axis == self.axis else 0) + start
            yield replace(self, axis=axis, first=first, shape=tuple(shape), offset=tuple(offset))


@dataclass(frozen=True, slots=True)
class Cut:
    """A whole checkpoint: pieces by parameter, in the model's order, and the objects stored beside tensors.

    The objects are what Megatron's linear layers keep for FP8; a load asks for them though they hold nothing.
    """

    pieces: dict[str, list[Piece]]
    objects: list[ShardedObject]


def cut(model: GPTModel, tp: int = 1) -> Cut:
    """What the checkpoint of this whole model holds, with the boundaries that `tp` tensor-parallel ranks would write.

    `model` has one stage and one tensor-parallel rank; its parameters may be on the meta device.
    """
    parameters = dict(model.named_parameters())
    pieces: dict[str, list[Piece]] = {}
    objects = []
    for name, entry in model.sharded_state_dict(metadata=dict(METADATA)).items():
        if isinstance(entry, ShardedObject):
            objects.append(entry)
        else:
            axis = _split_dimension(parameters[name])
            whole = _pieces(name, entry)
            pieces[name] = list(whole if axis is None else (run for piece in whole for run in piece.split(axis, tp)))
    return Cut(pieces, objects)


def _split_dimension(parameter: torch.nn.Parameter) -> int | None:
    split = getattr(parameter, "tensor_model_parallel", False)
    return int(parameter.partition_dim) if split else None  # type: ignore[attr-defined]


def _pieces(name: str, entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Piece]:
    parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    first = 0
    for part in parts:
        shape = tuple(part.local_shape)
        yield Piece(name, 0, first, shape, part.key, tuple(part.global_offset), tuple(part.global_shape))
        first += shape[0]
