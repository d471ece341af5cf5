"""Read checkpoints as data: a folder may come from a stranger, and nothing that lies in it is called.

Three files of a torch_dist folder hold pickles, which can name any function to be called with any arguments:

- `.metadata`, the table of contents. torch unpickles it as it stands; here only the names that such a table holds are
  known, and only they can be made.
- Objects among the tensors of a `.distcp` file. torch unpickles them as they stand; here, as tensors and plain values.
- `common.pt`, and the tensors themselves. torch reads them as tensors and plain values.

Importing this file puts its readers in place of torch's, so that every class of torch and Megatron that reads a
checkpoint in this process, by whatever name, reads it so.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from megasharp.common.errors import UserError, one_line

_COMMON = "common.pt"
# Records of a table of contents, as torch's and Megatron's writers store it, old and new: none has a method that acts.
_RECORDS: tuple[type, ...] = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    torch.Size,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
)
_KNOWN: dict[tuple[str, str], object] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    # From Python 3.13 on paths are in a module of their own.
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_SET_ATTRIBUTES = pickle._Unpickler.dispatch[pickle.BUILD[0]]
# In torch's words for a pickle that it will not read as data.
_FORBIDDEN = re.compile(r"GLOBAL:? ([\w.]+)")


def _refusal(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: asks to call or make {name}, which no checkpoint needs: it was not executed, and nothing was loaded; "
        "do not use this folder before you know who wrote that"
    )


class _Contents(pickle._Unpickler):
    """Unpickles a table of contents. The one in Python, because the one in C lets a pickle change known classes."""

    stack: list[Any]

    def __init__(self, path: Path) -> None:
        # Reading a pipe could wait without end.
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; copy the folder again")
        # Read once: what is checked is what is used.
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> object:
        """Return what is known by this name, and nothing else."""
        if (module, name) not in _KNOWN:
            raise _refusal(self._path, f"{module}.{name}")
        return _KNOWN[module, name]

    def _build(self) -> None:
        # Records of its own making, not the classes themselves nor the members of an enumeration.
        record = self.stack[-2]
        if isinstance(record, type) or not is_dataclass(record):
            raise _refusal(self._path, f"attributes of {record!r}")
        _SET_ATTRIBUTES(self)  # type: ignore[arg-type]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


# Tables that `load_shards` has read, while Megatron loads what they name.
_READ: dict[Path, Metadata] = {}


def _read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """Read a table of contents; replaces torch's.

    Raises:
        UserError: it names what no such table holds, or files outside its folder. Any other error: it is damaged.
    """
    path = Path(self._get_metadata_path(kwargs.get("rank")))
    if path in _READ:
        return _READ[path]
    found = _Contents(path).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    for name in {info.relative_path for info in (found.storage_data or {}).values()}:
        if Path(name).name != name:
            raise UserError(f"{path}: names the file {name!r}, which is not in its folder: it was not opened")
    if not isinstance(found.storage_meta, StorageMeta):
        found.storage_meta = StorageMeta()
    found.storage_meta.checkpoint_id, found.storage_meta.load_id = self.path, self.load_id
    return found


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Take an object among the shards; replaces torch's. Raises UserError where it is more than data."""
    assert self.metadata is not None and self.metadata.storage_meta is not None
    info = self.metadata.storage_data[read_item.storage_index]
    data = _data(value, Path(str(self.metadata.storage_meta.checkpoint_id)) / info.relative_path)
    name = read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], data)
    else:
        self.state_dict[name] = data


def _data(source: BinaryIO, path: Path) -> object:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal_of(path, error) or _no_data(path) from None


def _no_data(path: Path) -> UserError:
    return UserError(
        f"{path}: holds more than tensors and plain values, or is damaged: nothing in it was executed; copy the folder "
        "again, and do not use it before you know who wrote that"
    )


def refusal_of(path: Path, error: BaseException) -> UserError | None:
    """Return the refusal of what torch would not read as data; None where it has another reason, such as damage."""
    named = _FORBIDDEN.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return _refusal(path, named.group(1)) if named else None


# Each class that reads, in torch and in every version of Megatron, takes these two from here.
FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
# By this variable torch would unpickle `common.pt` as it stands.
_NOT_AS_DATA = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_shards(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill Megatron's sharded `state` from the folder, as `dist_checkpointing.load`; all ranks must call it.

    Raises:
        UserError: the folder asks for more than to be read. Many other kinds: shards are damaged.
    """
    os.environ.pop(_NOT_AS_DATA, None)
    reader = FileSystemReader(folder)
    # Here, because torch hides what is raised further down behind an error of its own.
    _READ[Path(reader._get_metadata_path())] = reader.read_metadata()
    try:
        return cast("dict[str, Any]", dist_checkpointing.load(state, str(folder)))
    except CheckpointException as error:
        # A BaseException, by torch's choice, and a page long.
        failures = [failure for failure, _ in error.failures.values()]
        found = [failure if isinstance(failure, UserError) else refusal_of(folder, failure) for failure in failures]
        texts = "; ".join(dict.fromkeys(map(one_line, failures)))
        raise next(filter(None, found), RuntimeError(texts)) from None
    except pickle.UnpicklingError as error:
        raise refusal_of(folder / _COMMON, error) or _no_data(folder / _COMMON) from None
    finally:
        _READ.clear()
