"""Pickles that would run a command, put where a checkpoint of ours holds one."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from megasharp.checkpoint.manifest import FileEntry, read_manifest, write_manifest
from megasharp.common.files import FileHash

PLACES = ("table", "class", "elsewhere", "common", "object", "tensor")


class Command:
    """Unpickling it creates `made`."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._made}",)


def plant(shards: Path, place: str, made: Path) -> tuple[Path, str]:
    """Plant one in a folder of shards; returns the file that holds it and the words that its refusal must have."""
    contents, common = shards / ".metadata", shards / "common.pt"
    if place == "common":
        torch.save({**torch.load(common, weights_only=False), "planted": Command(made)}, common)
        return common, "posix.system"
    table: Metadata = pickle.loads(contents.read_bytes())
    words, path = "posix.system", contents
    if place == "table":
        table.planner_data = Command(made)
    elif place == "class":
        words = "attributes of <class 'torch.distributed.checkpoint.metadata.StorageMeta'>"
    elif place == "elsewhere":
        words = f"'{made}', which is not in its folder"
        next(iter(table.storage_data.values())).relative_path = str(made)
    else:
        path = _in_a_shard(shards, table, Command(made), objects=place == "object")
    pickled = pickle.dumps(table)
    contents.write_bytes(pickled if place != "class" else _with_a_changed_class(pickled))
    return path, words


def _in_a_shard(shards: Path, table: Metadata, value: object, *, objects: bool) -> Path:
    """Put `value` behind a shard's end, and let the first object or tensor lie there."""
    of_kind = (
        (index, info)
        for index, info in table.storage_data.items()
        if isinstance(table.state_dict_metadata[index.fqn], BytesStorageMetadata) == objects
    )
    _, info = next(of_kind)
    written = io.BytesIO()
    torch.save([value], written)
    path = shards / info.relative_path
    info.offset, info.length = path.stat().st_size, written.tell()
    path.write_bytes(path.read_bytes() + written.getvalue())
    return path


def _with_a_changed_class(pickled: bytes) -> bytes:
    """The table behind an instruction that sets an attribute of the class StorageMeta, without any call."""
    # GLOBAL name; MARK, NONE, dict of one; BUILD; POP.
    name = f"c{StorageMeta.__module__}\n{StorageMeta.__name__}\n".encode()
    start = b"\x80\x04"
    return start + name + b"N}\x8c\x07load_id\x8c\x07changeds\x86b0" + pickled.removeprefix(start)


def record_again(checkpoint: Path, *changed: Path) -> None:
    """Give files of a run's checkpoint the sizes and hashes of now in its manifest, as whoever made it would."""
    manifest = read_manifest(checkpoint)
    entries = {str(file.relative_to(checkpoint)): FileEntry.of(FileHash.of(file)) for file in changed}
    write_manifest(checkpoint, manifest.model_copy(update={"files": {**manifest.files, **entries}}))
