"""Shards on their way to the disk: Megatron plans and collects, a thread of the rank writes meanwhile.

Megatron's own ways to write in the background fork the rank, or hand tensors to a process that outlives it. Writing
lets go of the interpreter, so a thread is enough, and what is left to do on the way is only the copy of the state.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from megasharp.common.errors import one_line
from megasharp.common.files import FileHash

# From 0.19 on Megatron would leave planning to a package of its own, nvidia-resiliency-ext, unless told otherwise.
_STRATEGY = "async_strategy"
_OWN_PLANS = {_STRATEGY: "mcore"} if _STRATEGY in inspect.signature(dist_checkpointing.save).parameters else {}
# One of Megatron's files: its path, its key, and (bytes, tensors) with the plan's items.
_Bucket = tuple[str, str, tuple[list[Any], list[Any]]]


class ShardWriting:
    """A sharded state dictionary on its way into an existing empty folder; all ranks must make one.

    With `copy` the state may change as soon as this has returned; without, only after `finish`. `metadata` is what a
    load is told of how the optimizer's state was cut.
    """

    def __init__(self, state: dict[str, Any], folder: Path, metadata: Mapping[str, Any], *, copy: bool) -> None:
        # Megatron's own queue would be a process, and one for all saves: results of two would get mixed up.
        filesystem_async._results_queue = queue.Queue()
        self._request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, content_metadata=dict(metadata), **_OWN_PLANS
        )
        self._folder = folder
        self._files: dict[str, FileHash] = {}
        self._thread: threading.Thread | None = None
        if self._request.async_fn is not None:
            (transforms, _), (_, buckets, results) = self._request.async_fn.args, self._request.async_fn_args
            work = (transforms, [_on_cpu(bucket, copy) for bucket in buckets], results)
            # A run that ends in an error does not wait for what nobody will finish.
            self._thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's files are written, or could not be."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> dict[str, FileHash]:
        """Wait until all ranks have written, complete the folder, and say what this rank wrote, by absolute path.

        All ranks must call it, in the order in which the writings began. Raises RuntimeError on all of them where one
        could not write.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            for step in self._request.finalize_fns:
                step()
        except CheckpointException as error:
            # No Exception, by torch's choice, and a page long; only the first rank is told the reasons.
            reasons = "; ".join(f"rank {rank}: {one_line(told[0])}" for rank, told in error.failures.items())
            raise RuntimeError(f"shards were not written: {reasons or 'another rank says why'}") from None
        if dist.get_rank() == 0:
            self._files |= {str(path): FileHash.of(path) for path in self._folder.iterdir() if not _is_shard(path)}
        return self._files

    def _write(self, transforms: list[Any], buckets: list[_Bucket], results: queue.Queue[Any]) -> None:
        # Megatron switches off garbage collection around it, which is for forked processes.
        write = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
        written: dict[int, list[Any]] = {}
        try:
            for number, bucket in enumerate(buckets):
                answers: queue.Queue[Any] = queue.Queue()
                started: queue.Queue[int] = queue.Queue()
                started.put(number)
                write(transforms, number, bucket, answers, started, use_fsync=True)
                _, answer = answers.get_nowait()
                if isinstance(answer, Exception):
                    raise answer
                written[number] = answer
                self._files[bucket[0]] = FileHash.of(Path(bucket[0]))
        except Exception as error:
            results.put(error)
        else:
            results.put(written)


def _on_cpu(bucket: _Bucket, copy: bool) -> _Bucket:
    """Where Megatron's writer wants everything; with `copy` in memory of its own."""
    path, key, (texts, tensors) = bucket
    return path, key, (texts, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors])


def _is_shard(path: Path) -> bool:
    """Of some rank; everything else in the folder describes all of them, and the first rank has written it."""
    return path.suffix == ".distcp"
