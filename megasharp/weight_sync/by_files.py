"""Weights to engines through files that the driver writes.

`SharedMemory` is for engines on this machine: each bucket is one file in /dev/shm that all of them read, and that is
then removed. `Disk` is for engines that see the same folder: all buckets become files of one checkpoint, which they
load whole.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megasharp.common.errors import UserError, one_line
from megasharp.common.files import SHARED_MEMORY, Scratch, remove_abandoned
from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import FOLDER_HEADER, Entry, Header, Stamp, laid_out, new_stamp, write_bucket
from megasharp.weight_sync.buckets import Bucket, Digests, buckets, in_dtype, on_cpu
from megasharp.weight_sync.endpoints import WeightSource, joined
from megasharp.weight_sync.receivers import Receivers

# Prefix of the folders that a push writes.
PUSH_FOLDER = "megasharp-push-"


class Disk:
    """Satisfies `Transport`. The engines sample on while the folder is written."""

    def __init__(self, receivers: Receivers, config: SyncConfig, dtype: torch.dtype, folder: Path | None) -> None:
        if folder is None:
            raise UserError("sync.transport: disk needs a folder that engines can read")
        self._receivers = receivers
        self._config = config
        self._dtype = dtype
        self._parent = folder
        remove_abandoned(PUSH_FOLDER, self._parent)

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything. Raises UserError when no engine is left, or the folder cannot be written."""
        stamp, digests = new_stamp(version, memory_version), Digests(self._config.verify)
        limit = self._config.limit_s
        with Scratch(PUSH_FOLDER, self._parent) as folder:
            try:
                tensors = on_cpu(in_dtype(joined(source, memory), self._dtype))
                written: list[Entry] = []
                for number, bucket in enumerate(buckets(tensors, self._config.bucket_mb)):
                    _write(folder / f"model-{number:05d}.safetensors", bucket)
                    digests.of(bucket)
                    # The files themselves say where a tensor is; the header lists what there is.
                    written += [replace(entry, offset=0) for entry in laid_out(bucket)]
                (folder / FOLDER_HEADER).write_text(Header(stamp, tuple(written)).to_json())
                self._receivers.pause()
                self._receivers.each("load of weights", lambda api: api.load_folder(folder, version, limit))
                self._receivers.compare(digests)
                self._receivers.go_on()
            except BaseException:
                self._receivers.release()
                raise


def _write(path: Path, bucket: Bucket) -> None:
    try:
        # Copies: the format refuses tensors that share memory, as tied weights do.
        save_file({name: tensor.clone() for name, tensor in bucket}, path)
    except Exception as error:
        raise UserError(f"{path}: cannot write weights ({one_line(error)}); free space or fix the folder") from error


class SharedMemory:
    """Satisfies `Transport`. All engines read a bucket at the same time; then its file is removed."""

    def __init__(self, receivers: Receivers, config: SyncConfig, dtype: torch.dtype, folder: Path | None) -> None:
        self._receivers = receivers
        self._config = config
        self._dtype = dtype
        self._parent = folder or SHARED_MEMORY
        remove_abandoned(PUSH_FOLDER, self._parent)

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything. Raises UserError when no engine is left, or a bucket cannot be written."""
        stamp, digests = new_stamp(version, memory_version), Digests(self._config.verify)
        with Scratch(PUSH_FOLDER, self._parent) as folder:
            try:
                self._receivers.start()
                tensors = on_cpu(in_dtype(joined(source, memory), self._dtype))
                for bucket in buckets(tensors, self._config.bucket_mb):
                    self._load(folder / "bucket", stamp, bucket, digests)
                self._receivers.end(stamp)
                self._receivers.compare(digests)
                self._receivers.go_on()
            except BaseException:
                self._receivers.release()
                raise

    def _load(self, path: Path, stamp: Stamp, bucket: Bucket, digests: Digests) -> None:
        try:
            write_bucket(path, stamp, bucket, digests.of(bucket))
        except OSError as error:
            raise UserError(
                f"{path}: cannot write a bucket of weights ({one_line(error)}); lower sync.bucket_mb "
                f"({self._config.bucket_mb}), enlarge {self._parent}, or use sync.transport: disk"
            ) from error
        try:
            tp, limit = self._receivers.tp, self._config.limit_s
            self._receivers.each("load of weights", lambda api: api.load_file(path, tp, limit))
        finally:
            path.unlink(missing_ok=True)
