"""A broadcast as the learner's ranks carry it out: the source of a pipeline stage sends, its peers help it gather.

The functions run in every rank, through `Ranks.apply`. The source posts to the engines what comes, and sends it at the
same time; it keeps its groups between pushes.

A process group that joins one rank of the learner with the ranks of engines, outside the learner's own group.

Engines make theirs with SGLang's init_weights_update_group: rank 0 keeps a store at an address, all meet there. This
is the same over torch.distributed alone. Where a rank's default group is, and whether it has one, does not matter.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from megasharp.common.errors import one_line
from megasharp.rollout.sglang.bucket import Header, Stamp, laid_out
from megasharp.rollout.sglang.client.api import EngineApi, GroupSeat, Refused
from megasharp.weight_sync.buckets import Bucket, Digests, buckets, in_dtype, prefixed
from megasharp.weight_sync.colocation import Failure, Posts
from megasharp.weight_sync.rank_sources import RankPart, stage_of

_LISTEN = 128


class Meeting:
    """A store that listens at one address only; `port` is where."""

    def __init__(self, host: str, world: int, limit_s: float) -> None:
        listener = socket.create_server((host, 0), backlog=_LISTEN)
        self.port: int = listener.getsockname()[1]
        # torch's own listening would be on every interface of the machine.
        self.store = TCPStore(
            host,
            self.port,
            world,
            is_master=True,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


class SenderGroup:
    """Rank 0 of a group whose other ranks are engines'; blocks until all have joined.

    Raises RuntimeError where they do not within the time limit.
    """

    def __init__(self, meeting: Meeting, name: str, world: int, backend: str, limit_s: float) -> None:
        self._meeting = meeting
        group, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            c10d.Backend(backend),
            PrefixStore(name, meeting.store),
            group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=limit_s),
        )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self._group = group

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor to all other ranks; it must not change until the work is done."""
        work: dist.Work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        return work

    def close(self) -> None:
        """Leave the group, whatever is still under way in it."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(self._group)


# Who fails first is not always the one at fault: a broken connection is noticed on both its ends.
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The group of one pipeline stage: rank 0 is the stage's source, then come the `tp` ranks of each engine in order.

    `engines` are pairs of a number and an API. Times are in seconds.
    """

    stage: int
    name: str
    backend: str
    host: str
    engines: tuple[tuple[int, EngineApi], ...]
    tp: int
    join_s: float
    limit_s: float

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 1 + self.tp * len(self.engines)

    def offset(self, number: int) -> int:
        """The first rank of an engine, by its number."""
        return 1 + self.tp * [each for each, _ in self.engines].index(number)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """How one stage of one network is sent; `prefix` goes before every name."""

    stamp: Stamp
    prefix: str
    dtype: torch.dtype
    bucket_mb: int
    verify: bool


@dataclass(slots=True)
class Sent:
    """What came of it at the source: engines' failures by number, or one of its own, and digests by tensor."""

    failures: dict[int, Failure] = field(default_factory=dict)
    own: str | None = None
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every engine did its part."""
        return not self.failures and self.own is None


_groups: dict[str, SenderGroup] = {}


def join(part: RankPart, plan: GroupPlan) -> Sent | None:
    """Form the group; None on ranks that are not the stage's source."""
    if stage_of(part) != plan.stage:
        return None
    meeting = Meeting(plan.host, plan.world, plan.join_s)
    port = meeting.port

    def meet(number: int, api: EngineApi) -> Refused | None:
        where = GroupSeat(plan.name, plan.backend, plan.host, port, plan.offset(number), plan.world)
        return api.join_group(where, plan.join_s)

    posts = Posts(plan.engines, meet)
    own = None
    try:
        _groups[plan.name] = SenderGroup(meeting, plan.name, plan.world, plan.backend, plan.join_s)
    except RuntimeError as error:
        own = one_line(error)
        # Engines that wait there for the one that did not come are let go.
        del meeting
    return Sent(posts.failures(plan.join_s, _GRACE_S), own)


def leave(part: RankPart, name: str) -> None:
    """Leave the group of that name, on the rank that is in it."""
    group = _groups.pop(name, None)
    if group is not None:
        group.close()


def send(part: RankPart, group: GroupPlan, plan: SendPlan) -> Sent | None:
    """Send this stage's weights; None on ranks that are not the stage's source.

    After a failure nothing more is sent, but the export goes on to its end: the source's peers take part in it.
    """
    if part.place.pp != group.stage:
        return None
    tensors = in_dtype(prefixed(part.export_weights(), plan.prefix), plan.dtype)
    sent, digests = Sent(), Digests(plan.verify)
    for bucket in buckets(tensors, plan.bucket_mb):
        if sent.good:
            digests.of(bucket)
            _send_bucket(group, plan.stamp, bucket, sent)
    sent.digests = digests.by_name
    return sent if stage_of(part) == group.stage else None


def _send_bucket(group: GroupPlan, stamp: Stamp, bucket: Bucket, sent: Sent) -> None:
    entries = laid_out(bucket)
    header = Header(stamp, entries).to_json()
    # Announced first: an engine that refuses does so before the others wait for it in a collective.
    posts = Posts(group.engines, lambda _, api: api.announce(header, group.tp, group.limit_s))
    sent.failures = posts.failures(group.limit_s, _GRACE_S)
    if sent.failures:
        return
    posts = Posts(group.engines, lambda _, api: api.receive_broadcast(entries, group.name, group.limit_s))
    flat = _in_a_row([tensor for _, tensor in bucket])
    work = _groups[group.name].broadcast(flat)
    sent.failures = posts.failures(group.limit_s, _GRACE_S)
    if not sent.failures:
        # All of them have it, so this cannot take long.
        work.wait()


def _in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes one after another, uint8, as SGLang's flattened buckets have them: without gaps."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
