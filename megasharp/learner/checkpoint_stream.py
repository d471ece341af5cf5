"""Read and write a model's torch_dist checkpoint one parameter at a time, under whatever layout.

`cut` says how the checkpoint is cut. Megatron stores parameters of all layers as one tensor with the layer in front,
and a gated MLP's gate and up rows as two pieces. The stored tensors are the same for every TP x PP; only the boundaries
of their pieces differ.

`StreamedCheckpoint` reads. Opening it checks the files' lengths and every stored tensor's name, shape and dtype;
tensors of an optimizer, which a run's checkpoint holds beside the weights, are passed over.

`write_streamed` writes what Megatron reads as a checkpoint of its own. Megatron's `dist_checkpointing.save` wants all
tensors of a rank at once. But its files are those of torch.distributed.checkpoint, whose writer asks a planner for each
tensor when its turn comes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megasharp.common.errors import UserError, one_line
from megasharp.convert.families.family import is_of_expert
from megasharp.learner.data_only import refusal_of
from megasharp.learner.sharded_state import METADATA


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of a parameter's rows (`axis` 0) or columns (1), whole in every other dimension.

    `parameter` is the Megatron name with its global layer number. The piece begins at `first` in it and has the size
    `shape`. In the checkpoint it is at `offset` of the stored tensor `key`, which has the shape `whole` and may have
    dimensions before the parameter's own (the layer).
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
        """Return this piece of the whole parameter: a view."""
        return parameter.narrow(self.axis, self.first, self.shape[self.axis])

    def split(self, axis: int, count: int) -> Iterator[Piece]:
        """Split it into `count` runs along `axis`; the last is shorter where they are not equal."""
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

    The objects are those that Megatron's linear layers keep for FP8; a load asks for them though they hold nothing.
    """

    pieces: dict[str, list[Piece]]
    objects: list[ShardedObject]


def cut(model: GPTModel, tp: int = 1) -> Cut:
    """Cut the checkpoint of this whole model, at the boundaries that `tp` tensor-parallel ranks would write.

    `model` has one stage and one tensor-parallel rank; its parameters may be on the meta device.
    """
    parameters = dict(model.named_parameters())
    pieces: dict[str, list[Piece]] = {}
    objects = []
    for name, entry in model.sharded_state_dict(metadata=dict(METADATA)).items():
        if isinstance(entry, ShardedObject):
            objects.append(entry)
        else:
            parameter, whole = parameters[name], _pieces(name, entry)
            # Experts are pieces already, which ranks hold whole.
            if getattr(parameter, "tensor_model_parallel", False) and not is_of_expert(name):
                axis = int(parameter.partition_dim)
                pieces[name] = [run for piece in whole for run in piece.split(axis, tp)]
            else:
                pieces[name] = list(whole)
    return Cut(pieces, objects)


def _pieces(name: str, entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Piece]:
    parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    first = 0
    for part in parts:
        shape = tuple(part.local_shape)
        yield Piece(name, 0, first, shape, part.key, tuple(part.global_offset), tuple(part.global_shape))
        first += shape[0]


_CONTENTS = ".metadata"
_OPTIMIZER = ("optimizer.", "chained_")


class StreamedCheckpoint:
    """The weights in `folder`, which must hold exactly the parameters of `cut`.

    Raises UserError, naming tensor and file, where files are missing or truncated, where a tensor is missing, extra,
    misshapen, not complete or not floating point, and where its table of contents asks for more than to be read.
    """

    def __init__(self, folder: Path, cut: Cut) -> None:
        self._folder, self._cut = folder, cut
        self._reader = FileSystemReader(folder)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
            assert self._metadata.storage_data, "it lists no files"
        except UserError:
            raise
        except Exception as error:  # unpickling damaged bytes raises anything
            raise UserError(
                f"{folder / _CONTENTS}: not a torch_dist checkpoint's table of contents: {one_line(error)}"
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._check()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the parameter is stored in; its pieces agree."""
        return self._stored(self._cut.pieces[name][0].key).properties.dtype

    def parameter(self, name: str) -> Tensor:
        """Read the whole parameter in its stored dtype, into memory of its own.

        Raises:
            UserError: the file cannot be read.
        """
        pieces = self._cut.pieces[name]
        rows = sum(piece.shape[0] for piece in pieces)
        whole = torch.empty(rows, *pieces[0].shape[1:], dtype=self.dtype(name))
        for piece in pieces:
            self._read(piece, piece.of(whole).view(piece.stored_shape))
        return whole

    def _read(self, piece: Piece, target: Tensor) -> None:
        chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.stored_shape))
        items = create_read_items_for_chunk_list(piece.key, self._stored(piece.key), [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _ReadPlanner(target)).wait()
        except Exception as error:  # torch raises many kinds for damaged files
            files = sorted({str(self._file(item.storage_index)) for item in items})
            refused = refusal_of(Path(files[0]), error)
            raise refused or UserError(
                f"{', '.join(files)}: tensor {piece.parameter} cannot be read: {one_line(error)}"
            ) from error

    def _stored(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def _file(self, index: MetadataIndex) -> Path:
        return self._folder / str(self._metadata.storage_data[index].relative_path)

    def _check(self) -> None:
        keys = {piece.key: piece for pieces in self._cut.pieces.values() for piece in pieces}
        for key, piece in keys.items():
            self._check_stored(key, piece)
        for key, found in self._metadata.state_dict_metadata.items():
            weight = not key.startswith(_OPTIMIZER) and not isinstance(found, BytesStorageMetadata)
            if weight and key not in keys:
                raise UserError(
                    f"{self._folder / _CONTENTS}: extra tensor {key}, which the model of its config.json has not"
                )
        for index, info in self._metadata.storage_data.items():
            if index.fqn not in keys:
                continue
            path, end = self._file(index), info.offset + info.length
            if not path.is_file():
                raise UserError(f"{path} does not exist, but tensor {index.fqn} is in it: copy the whole folder")
            if path.stat().st_size < end:
                raise UserError(f"{path} is truncated: tensor {index.fqn} ends at byte {end} of {path.stat().st_size}")

    def _check_stored(self, key: str, piece: Piece) -> None:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(f"{self._folder / _CONTENTS}: tensor {key} is missing: the model of its config.json has it")
        where = f"{self._folder / _CONTENTS}: tensor {key}"
        stored = tuple(found.size)
        # A vocabulary may have been padded for more ranks than now; these two have no layer in front.
        padded = (
            len(piece.whole) == len(piece.shape)
            and piece.parameter.endswith(("word_embeddings.weight", "output_layer.weight"))
            and stored[1:] == piece.whole[1:]
            and stored[0] > piece.whole[0]
        )
        if stored != piece.whole and not padded:
            asked = f"the model of its config.json asks for {piece.whole}"
            raise UserError(f"{where} has shape {stored}, but {asked}")
        if not found.properties.dtype.is_floating_point:
            raise UserError(f"{where} has dtype {found.properties.dtype}: expected a floating point one")
        if sum(chunk.sizes.numel() for chunk in found.chunks) < found.size.numel():
            raise UserError(f"{where} is not complete: parts of it are in no file")


class _ReadPlanner(DefaultLoadPlanner):
    """Puts into one tensor the parts that torch's reader finds."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the target that an item fills."""
        part = self._target
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: `tensor` is the target's memory."""


# Of a parameter's name, its whole value.
Values = Callable[[str], Tensor]
# Of a parameter's name, its pipeline stage.
StageOf = Callable[[str], int]

_MAX_FILE_BYTES = 5 * 1024**3
_Place = tuple[str, tuple[int, ...]]


def write_streamed(folder: Path, cut: Cut, dtype: torch.dtype, value: Values, stage: StageOf) -> None:
    """Write a checkpoint of `cut` into the existing empty folder.

    `value` is asked for each parameter once, in the order of `cut`, and rounded to `dtype`; each `stage` gets files of
    its own. Raises what torch's writer raises, such as OSError.
    """
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan(items) for items in _files(cut, dtype, stage)]
    plans, metadata = create_default_global_save_plan(plans)
    planner = _WritePlanner(cut, dtype, value)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    torch.save({"content_metadata": METADATA}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    writer.finish(metadata, results)


def _files(cut: Cut, dtype: torch.dtype, stage: StageOf) -> Iterator[list[WriteItem]]:
    """Yield each file's items: the objects first, then each stage's tensors in runs of bounded size."""
    items = [WriteItem(MetadataIndex(each.unique_key), WriteItemType.BYTE_IO) for each in cut.objects]
    present, size = 0, 0
    for name, pieces in cut.pieces.items():
        nbytes = dtype.itemsize * sum(torch.Size(piece.shape).numel() for piece in pieces)
        if items and (stage(name) != present or size + nbytes > _MAX_FILE_BYTES):
            yield items
            items, size = [], 0
        present = stage(name)
        for piece in pieces:
            offset, whole = torch.Size(piece.offset), torch.Size(piece.whole)
            chunk = ChunkStorageMetadata(offset, torch.Size(piece.stored_shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), whole)
            items.append(WriteItem(MetadataIndex(piece.key, offset), WriteItemType.SHARD, tensor_data=data))
        size += nbytes
    yield items


class _WritePlanner(DefaultSavePlanner):
    """Gives the writer each piece when it asks, from the one parameter that is in memory."""

    def __init__(self, cut: Cut, dtype: torch.dtype, value: Values) -> None:
        super().__init__()
        self._pieces: dict[_Place, Piece] = {
            (piece.key, piece.offset): piece for pieces in cut.pieces.values() for piece in pieces
        }
        self._objects = {each.unique_key: each for each in cut.objects}
        self._dtype = dtype
        self._value = value
        self._present: tuple[str, Tensor] | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return an item's data; torch's writer calls this for each, in the plan's order."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            # In a list, as Megatron's own strategy stores an object.
            torch.save([self._objects[index.fqn].data], data)
            return data
        assert index.offset is not None
        piece = self._pieces[index.fqn, tuple(index.offset)]
        name = piece.parameter
        if self._present is None or self._present[0] != name:
            # Dropped before the next one is made: only one is in memory.
            self._present = None
            self._present = name, self._value(name).to(self._dtype)
        return piece.of(self._present[1]).reshape(piece.stored_shape)
