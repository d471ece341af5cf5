"""A torch_dist checkpoint read one parameter at a time, under whatever layout it was written.

Opening it checks the files' lengths and every stored tensor's name, shape and dtype; tensors of an optimizer, which a
run's checkpoint holds beside the weights, are passed over.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megasharp.errors import UserError, one_line
from megasharp.mcore.pieces import Cut, Piece

_CONTENTS = ".metadata"
_OPTIMIZER = ("optimizer.", "chained_")


class StreamedCheckpoint:
    """The weights in `folder`, which must hold exactly the parameters of `cut`.

    Raises UserError, naming tensor and file: files that are missing or cut short; a tensor that is missing, extra,
    misshapen, not complete or not floating point.
    """

    def __init__(self, folder: Path, cut: Cut) -> None:
        self._folder, self._cut = folder, cut
        self._reader = FileSystemReader(folder)
        self._metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._check()

    def dtype(self, name: str) -> torch.dtype:
        """What the parameter is stored in; its pieces agree."""
        return self._stored(self._cut.pieces[name][0].key).properties.dtype

    def parameter(self, name: str) -> Tensor:
        """The whole parameter in its stored dtype, in memory of its own.

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
            self._reader.read_data(LoadPlan(items), _Planner(target)).wait()
        except Exception as error:  # torch raises many kinds for damaged files
            files = sorted({str(self._file(item.storage_index)) for item in items})
            raise UserError(
                f"{', '.join(files)}: tensor {piece.parameter} cannot be read: {one_line(error)}"
            ) from error

    def _read_metadata(self) -> Metadata:
        path = self._folder / _CONTENTS
        try:
            metadata = self._reader.read_metadata()
            assert metadata.storage_data, "it lists no files"
        except Exception as error:  # unpickling damaged bytes raises anything
            raise UserError(f"{path}: not a torch_dist checkpoint's table of contents: {one_line(error)}") from error
        return metadata

    def _keys(self) -> dict[str, Piece]:
        return {piece.key: piece for pieces in self._cut.pieces.values() for piece in pieces}

    def _stored(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def _file(self, index: MetadataIndex) -> Path:
        return self._folder / str(self._metadata.storage_data[index].relative_path)

    def _check(self) -> None:
        keys = self._keys()
        for key, piece in keys.items():
            self._check_stored(key, piece)
        for key, found in self._metadata.state_dict_metadata.items():
            weight = not key.startswith(_OPTIMIZER) and not isinstance(found, BytesStorageMetadata)
            if weight and key not in keys:
                raise UserError(
                    f"{self._folder / _CONTENTS}: extra tensor {key}, which the model of its config.json has not"
                )
        for index, info in self._metadata.storage_data.items():
            if index.fqn in keys:
                self._check_file(index, info.offset + info.length)

    def _check_stored(self, key: str, piece: Piece) -> None:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(f"{self._folder / _CONTENTS}: tensor {key} is missing: the model of its config.json has it")
        where = f"{self._folder / _CONTENTS}: tensor {key}"
        if not _fits(tuple(found.size), piece):
            asked = f"the model of its config.json asks for {piece.whole}"
            raise UserError(f"{where} has shape {tuple(found.size)}, but {asked}")
        if not found.properties.dtype.is_floating_point:
            raise UserError(f"{where} has dtype {found.properties.dtype}: expected a floating point one")
        if sum(chunk.sizes.numel() for chunk in found.chunks) < found.size.numel():
            raise UserError(f"{where} is not complete: parts of it are in no file")

    def _check_file(self, index: MetadataIndex, end: int) -> None:
        path = self._file(index)
        if not path.is_file():
            raise UserError(f"{path} does not exist, but tensor {index.fqn} is in it: copy the whole folder")
        if path.stat().st_size < end:
            raise UserError(f"{path} is truncated: tensor {index.fqn} ends at byte {end} of {path.stat().st_size}")


def _fits(stored: tuple[int, ...], piece: Piece) -> bool:
    """Equal shapes; a vocabulary may have been padded for more ranks than now."""
    leading = len(piece.whole) - len(piece.shape)
    padded = leading == 0 and piece.parameter.endswith(("word_embeddings.weight", "output_layer.weight"))
    same = stored == piece.whole
    return same or (padded and stored[1:] == piece.whole[1:] and stored[0] > piece.whole[0])


class _Planner(DefaultLoadPlanner):
    """Puts what torch's reader finds into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that an item fills."""
        part = self._target
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: `tensor` is the target's memory."""
