"""A torch_dist checkpoint written one parameter at a time; Megatron reads it as one of its own.

Megatron's `dist_checkpointing.save` wants all tensors of a rank at once. Its files are those of
torch.distributed.checkpoint, whose writer asks a planner for each tensor when its turn comes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megasharp.mcore.pieces import Cut, Piece
from megasharp.mcore.state import METADATA

# Given a parameter's name, its whole value.
Values = Callable[[str], Tensor]
# Which of the checkpoint's files a parameter goes to.
FileOf = Callable[[str], int]

_MAX_FILE_BYTES = 5 * 1024**3
_Place = tuple[str, tuple[int, ...]]


def write_streamed(folder: Path, cut: Cut, dtype: torch.dtype, value: Values, stage: FileOf) -> None:
    """Write a checkpoint of `cut` into the existing empty folder.

    `value` is asked for each parameter once, in the order of `cut`; each `stage` gets files of its own.
    Raises what the disk raises.
    """
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan(items) for items in _files(cut, dtype, stage)]
    plans, metadata = create_default_global_save_plan(plans)
    planner = _Planner(cut, dtype, value)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    torch.save({"content_metadata": METADATA}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    writer.finish(metadata, results)


def _files(cut: Cut, dtype: torch.dtype, stage: FileOf) -> Iterator[list[WriteItem]]:
    """Items by file: the objects first, then each stage's tensors in runs of bounded size."""
    items = [WriteItem(MetadataIndex(each.unique_key), WriteItemType.BYTE_IO) for each in cut.objects]
    present, size = 0, 0
    for name, pieces in cut.pieces.items():
        nbytes = dtype.itemsize * sum(torch.Size(piece.shape).numel() for piece in pieces)
        if items and (stage(name) != present or size + nbytes > _MAX_FILE_BYTES):
            yield items
            items, size = [], 0
        present = stage(name)
        items += [_item(piece, dtype) for piece in pieces]
        size += nbytes
    yield items


def _item(piece: Piece, dtype: torch.dtype) -> WriteItem:
    offset, shape = torch.Size(piece.offset), torch.Size(piece.stored_shape)
    data = TensorWriteData(ChunkStorageMetadata(offset, shape), TensorProperties(dtype=dtype), torch.Size(piece.whole))
    return WriteItem(MetadataIndex(piece.key, offset), WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
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
        """What torch's writer calls for each item, in the plan's order."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return _serialized(self._objects[index.fqn])
        assert index.offset is not None
        piece = self._pieces[index.fqn, tuple(index.offset)]
        return piece.of(self._parameter(piece.parameter)).reshape(piece.stored_shape)

    def _parameter(self, name: str) -> Tensor:
        if self._present is None or self._present[0] != name:
            self._present = None
            self._present = name, self._value(name).to(self._dtype)
        return self._present[1]


def _serialized(entry: ShardedObject) -> io.BytesIO:
    """As Megatron's own strategy stores an object: in a list."""
    data = io.BytesIO()
    torch.save([entry.data], data)
    return data
