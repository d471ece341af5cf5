"""Weights to engines on the learner's own devices, through handles of its memory: nothing is copied between devices.

On several nodes too: a handle is made and opened on one device, only its text travels. Not measured on a GPU; on a CPU
the handles are of files in /dev/shm.
"""

from __future__ import annotations

import torch

from megasharp.rollout.sglang.bucket import new_stamp
from megasharp.weight_sync.buckets import Digests
from megasharp.weight_sync.colocation import SharePlan
from megasharp.weight_sync.endpoints import WeightSource
from megasharp.weight_sync.ipc_rank import share
from megasharp.weight_sync.rank_sources import only, ranked
from megasharp.weight_sync.receivers import Receivers
from megasharp.weight_sync.settings import SyncSettings


class SharedHandles:
    """Satisfies `Transport`. Both networks must be `RankedSource`s over the same ranks.

    One of these ranks must be beside each rank of each engine.
    """

    def __init__(self, receivers: Receivers, settings: SyncSettings, dtype: torch.dtype) -> None:
        self._receivers = receivers
        self._settings = settings
        self._dtype = dtype

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything. Raises UserError when no engine is left."""
        stamp, digests = new_stamp(version, memory_version), Digests(self._settings.verify)
        mode = self._settings.in_flight
        try:
            self._receivers.start(mode)
            for prefix, part in ranked(source, memory):
                there = {member.process.index: member for member in self._receivers.alive()}
                plan = SharePlan(
                    stamp=stamp,
                    prefix=prefix,
                    dtype=self._dtype,
                    bucket_mb=self._settings.bucket_mb,
                    verify=self._settings.verify,
                    engines=tuple((number, member.process.api) for number, member in there.items()),
                    tp=self._receivers.tp,
                    limit_s=self._settings.limit_s,
                    beside=self._settings.beside,
                )
                sent = only(part.apply(share, plan))
                for number, failure in sent.failures.items():
                    reason = there[number].process.exit_reason() or failure.reason
                    self._receivers.lose(there[number], f"load of weights: {reason}")
                digests.by_name |= sent.digests
            self._receivers.end(stamp)
            self._receivers.compare(digests)
            self._receivers.go_on(mode)
        except BaseException:
            self._receivers.release()
            raise
