"""Weights to engines on this machine through memory: each bucket is one file in /dev/shm that all of them read."""

from __future__ import annotations

from pathlib import Path

import torch

from megasharp.errors import UserError, one_line
from megasharp.protocols import WeightSource
from megasharp.scratch import SHARED_MEMORY, Scratch, remove_abandoned
from megasharp.serving.bucket import Stamp, new_stamp, write_bucket
from megasharp.sync.buckets import Bucket, Digests, buckets, in_dtype, joined, on_cpu
from megasharp.sync.receivers import Receivers
from megasharp.sync.settings import PUSH_FOLDER, SyncSettings


class SharedMemory:
    """Satisfies `Transport`. All engines read a bucket at the same time; then its file is removed."""

    def __init__(self, receivers: Receivers, settings: SyncSettings, dtype: torch.dtype) -> None:
        self._receivers = receivers
        self._settings = settings
        self._dtype = dtype
        self._parent = settings.folder or SHARED_MEMORY
        remove_abandoned(PUSH_FOLDER, self._parent)

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything. Raises UserError when no engine is left, or a bucket cannot be written."""
        stamp, digests = new_stamp(version, memory_version), Digests(self._settings.verify)
        with Scratch(PUSH_FOLDER, self._parent) as folder:
            try:
                self._receivers.start(self._settings.in_flight)
                tensors = on_cpu(in_dtype(joined(source, memory), self._dtype))
                for bucket in buckets(tensors, self._settings.bucket_mb):
                    self._load(folder / "bucket", stamp, bucket, digests)
                self._receivers.end(stamp)
                self._receivers.compare(digests)
                self._receivers.go_on(self._settings.in_flight)
            except BaseException:
                self._receivers.release()
                raise

    def _load(self, path: Path, stamp: Stamp, bucket: Bucket, digests: Digests) -> None:
        try:
            write_bucket(path, stamp, bucket, digests.of(bucket))
        except OSError as error:
            raise UserError(
                f"{path}: cannot write a bucket of weights ({one_line(error)}); lower sync.bucket_mb "
                f"({self._settings.bucket_mb}), enlarge {self._parent}, or use sync.transport: disk"
            ) from error
        try:
            tp, limit = self._receivers.tp, self._settings.limit_s
            self._receivers.each("load of weights", lambda api: api.load_file(path, tp, limit))
        finally:
            path.unlink(missing_ok=True)
