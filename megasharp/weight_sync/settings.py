"""How a fleet's weights are pushed, as the user sets it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasharp.rollout.sglang.client.api import InFlight

TransportName = Literal["shared_memory", "disk", "gloo", "nccl", "ipc"]
# How folders begin that a push writes.
PUSH_FOLDER = "megasharp-push-"


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """How weights are pushed. With `verify` every push ends with a comparison of checksums of every tensor.

    `bucket_mb` (MiB) bounds what is in flight at once. `folder` is where the transport writes: null for /dev/shm, and
    required for disk. `in_flight` is what becomes of running requests: `retract` computes their cache again with the
    new weights, `in_place` goes on with what they have (later requests never see that). `host` is the address at which
    engines reach the learner's ranks for a broadcast. An engine that needs more than `limit_s` seconds for one call of
    a push is lost: for a bucket, and from disk or for checksums for all weights. A broadcast's group may take `join_s`
    to form, and an engine `settle_s` to come out of a broadcast that failed. `beside`: for each engine the learner's
    rank on whose device each of its ranks is, for `ipc`; empty where engines lie beside the ranks in order.
    """

    transport: TransportName = "shared_memory"
    bucket_mb: int = 512
    verify: bool = False
    in_flight: InFlight = "retract"
    folder: Path | None = None
    host: str = "127.0.0.1"
    limit_s: float = 600.0
    join_s: float = 60.0
    settle_s: float = 20.0
    beside: tuple[tuple[int, ...], ...] = ()
