"""Write a checkpoint's shards in the background: Megatron plans and collects, a thread of the rank writes meanwhile.

Megatron's own ways fork the rank, or hand tensors to a process that outlives it. Writing releases the interpreter lock,
so a thread is enough, and training waits only for the copy of the state.
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

# From 0.19 on Megatron would by default leave planning to a package of its own, nvidia-resiliency-ext.
_STRATEGY = "async_strategy"
_OWN_PLANS = {_STRATEGY: "mcore"} if _STRATEGY in inspect.signature(dist_checkpointing.save).parameters else {}
# One of Megatron's files: its path, its key, and (bytes, tensors) with the plan's items.
_Bucket = tuple[str, str, tuple[list[Any], list[Any]]]


class ShardWriting:
    """A sharded state dictionary being written into an existing empty folder; all ranks must make one.

    With `copy` the state may change as soon as this has returned; without, only after `finish`. `metadata` is stored
    beside the shards and says how the optimizer's state was cut.
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
            # Megatron's writer wants all tensors on the CPU; with `copy` in memory of their own.
            moved = [
                (path, key, (texts, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors]))
                for path, key, (texts, tensors) in buckets
            ]
            work = (transforms, moved, results)
            # A daemon: a run that ends in an error does not wait for shards that nobody will finish.
            self._thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether this rank's files are written, or could not be."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> dict[str, FileHash]:
        """Wait until all ranks have written, complete the folder, and return this rank's files by absolute path.

        All ranks must call it, in the order in which the writings began. Raises RuntimeError on all of them where one
        could not write.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            for step in self._request.finalize_fns:
                step()
        except CheckpointException as error:
            # A BaseException, by torch's choice, and a page long; only the first rank gets the reasons.
            reasons = "; ".join(f"rank {rank}: {one_line(failure[0])}" for rank, failure in error.failures.items())
            raise RuntimeError(f"shards were not written: {reasons or 'another rank says why'}") from None
        if dist.get_rank() == 0:
            # All but the ranks' shards describes all ranks, and the first one has written it.
            others = [path for path in self._folder.iterdir() if path.suffix != ".distcp"]
            self._files |= {str(path): FileHash.of(path) for path in others}
        return self._files

    def _write(self, transforms: list[Any], buckets: list[_Bucket], results: queue.Queue[Any]) -> None:
        # Unwrapped of Megatron's decorator, which switches off garbage collection: that is for forked processes.
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
