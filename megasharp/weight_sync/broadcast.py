"""Weights to engines anywhere by broadcast: gloo on CPUs, NCCL on GPUs, one source per pipeline stage.

`Broadcast` is the driver's half. `join`, `send` and `leave` run in every rank of the learner, through `Ranks.call`: a
stage's source posts to the engines what comes and sends it at the same time, while its peers help it gather. The source
keeps its groups between pushes, until the fleet changes.

Groups are formed, and stages sent, one after another in the order of the stages: two sources that sent at the same time
could each wait for an engine that waits for the other. A group (`SenderGroup`) joins one rank of the learner with the
ranks of engines, outside the learner's own group. Engines form theirs with SGLang's init_weights_update_group; here the
same is done over torch.distributed alone.

When an engine fails in a push, it is found and given up, all groups are left, and the push restarts without it. An
engine that hangs in a collective may hold others there that are behind it. Engines are asked in the order of their
ranks, so the first that does not answer is the one at fault, and its end frees the others.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from megasharp.common.errors import RunFailed, one_line
from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import Header, Stamp, laid_out, new_stamp
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, GroupSeat, Refused
from megasharp.rollout.sglang.client.launch import EngineHandle
from megasharp.rollout.sglang.client.members import Member
from megasharp.weight_sync.buckets import (
    Bucket,
    Digests,
    RankedSource,
    RankPart,
    buckets,
    in_dtype,
    only,
    ranked,
    stage_of,
)
from megasharp.weight_sync.colocation import Failure, Posts
from megasharp.weight_sync.endpoints import WeightSource, prefixed
from megasharp.weight_sync.receivers import Receivers

# Time for a group to form, and for an engine to come out of a broadcast that failed.
_JOIN_S = 60.0
SETTLE_S = 20.0
# Both ends notice a broken connection, so the first failure need not be that of the peer at fault.
_GRACE_S = 3.0
_LISTEN = 128
# The groups that this rank is in, by their names.
_groups: dict[str, SenderGroup] = {}


class Broadcast:
    """Satisfies `Transport`; both networks must be `RankedSource`s over the same ranks.

    `backend` is torch's name of the group's, `host` the address at which engines reach the learner's ranks.
    """

    def __init__(
        self,
        receivers: Receivers,
        config: SyncConfig,
        dtype: torch.dtype,
        backend: Literal["gloo", "nccl"],
        host: str,
    ) -> None:
        self._receivers = receivers
        self._config = config
        self._dtype = dtype
        self._backend = backend
        self._host = host
        self._groups: list[GroupPlan] = []
        # By their handles: one that was started again by hand has the address and key of the one before.
        self._grouped: list[EngineHandle] = []

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything; restarts without the engines that fail. Raises RunFailed when none is left."""
        parts = ranked(source, memory)
        digests = Digests(self._config.verify)
        try:
            self._receivers.start()
            stamp = new_stamp(version, memory_version)
            while not self._attempt(stamp, parts, digests):
                stamp = new_stamp(version, memory_version)
            self._receivers.end(stamp)
            self._receivers.compare(digests)
            self._receivers.go_on()
        except BaseException:
            # A collective left pending in a group would mix with the next push.
            with contextlib.suppress(Exception):
                self._leave(parts[0][1])
            self._groups = []
            self._receivers.release()
            raise

    def _attempt(self, stamp: Stamp, parts: list[tuple[str, RankedSource]], digests: Digests) -> bool:
        """Return True where every engine alive got everything; otherwise at least one of them is lost now."""
        policy = parts[0][1]
        for sent in self._carry_out(stamp, parts):
            if not sent.good:
                self._settle(sent, policy)
                return False
            digests.by_name |= sent.digests
        return True

    def _carry_out(self, stamp: Stamp, parts: list[tuple[str, RankedSource]]) -> Iterator[Sent]:
        """Form the groups where they are not those of the engines alive, then send; yields the outcomes one by one."""
        policy = parts[0][1]
        handles = [member.process for member in self._receivers.alive()]
        engines = tuple((handle.index, handle.api) for handle in handles)
        # A group's members are fixed: a fleet that has changed needs new groups.
        if not self._groups or self._grouped != handles:
            self._grouped = handles
            self._leave(policy)
            for stage in sorted({stage for stage in policy.call(stage_of) if stage is not None}):
                plan = GroupPlan(
                    stage=stage,
                    # A name is free again only in a new process.
                    name=f"megasharp-{stage}-{secrets.token_hex(4)}",
                    backend=self._backend,
                    host=self._host,
                    engines=engines,
                    tp=self._receivers.tp,
                    join_s=min(_JOIN_S, self._config.limit_s),
                    limit_s=self._config.limit_s,
                )
                self._groups.append(plan)
                yield only(policy.call(join, plan))
        for prefix, part in parts:
            how = SendPlan(stamp, prefix, self._dtype, self._config.bucket_mb, self._config.verify)
            for plan in self._groups:
                yield only(part.call(send, plan, how))

    def _leave(self, policy: RankedSource) -> None:
        """Leave all groups, the engines' side as far as they still answer."""
        for plan in self._groups:
            policy.call(leave, plan.name)
            for member in self._receivers.alive():
                with contextlib.suppress(EngineFailed):
                    member.process.api.leave_group(plan.name, SETTLE_S)
        self._groups = []

    def _settle(self, sent: Sent, policy: RankedSource) -> None:
        """After a failure: give up the engines at fault, have the others and the sources leave all groups.

        Raises RunFailed where no engine is left, or none is at fault.
        """
        groups, self._groups = self._groups, []
        for member in self._receivers.alive():
            failure = sent.failures.get(member.process.index)
            ended = member.process.exit_reason()
            if ended is not None or (failure is not None and failure.kind == "gone"):
                self._lose(member, ended or (failure.reason if failure else ""))
        for plan in groups:
            policy.call(leave, plan.name)
        for member in self._receivers.alive():
            try:
                for plan in groups:
                    member.process.api.leave_group(plan.name, SETTLE_S)
            except EngineFailed as error:
                # One that does not answer is stuck in a collective.
                failure = sent.failures.get(member.process.index)
                self._lose(member, failure.reason if failure else str(error))
        # The fleet's watch may have found who is dead before.
        if {number for number, _ in groups[0].engines} <= {m.process.index for m in self._receivers.alive()}:
            self._lose_who_failed_alone(sent)

    def _lose_who_failed_alone(self, sent: Sent) -> None:
        """Give up engines that refused, else slow ones: nobody is gone or stuck, so they failed on their own.

        Raises RunFailed where no engine failed.
        """
        for kind in ("refused", "slow"):
            at_fault = {number: failure for number, failure in sent.failures.items() if failure.kind == kind}
            for member in self._receivers.alive() if at_fault else []:
                if member.process.index in at_fault:
                    self._lose(member, at_fault[member.process.index].reason)
            if at_fault:
                return
        raise RunFailed(f"the weights could not be broadcast: {sent.own}; see the logs of the learner's ranks")

    def _lose(self, member: Member, reason: str) -> None:
        self._receivers.lose(member, f"broadcast of weights: {reason}")


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
    """Instructions to send one stage of one network; `prefix` goes before every name."""

    stamp: Stamp
    prefix: str
    dtype: torch.dtype
    bucket_mb: int
    verify: bool


@dataclass(slots=True)
class Sent:
    """Outcome at the source: engines' failures by number, or one of its own (`own`), and digests by tensor."""

    failures: dict[int, Failure] = field(default_factory=dict)
    own: str | None = None
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """True where every engine did its part."""
        return not self.failures and self.own is None


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
    # The bytes one after another without gaps, uint8, as SGLang's flattened buckets have them.
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket])
    work = _groups[group.name].broadcast(flat)
    sent.failures = posts.failures(group.limit_s, _GRACE_S)
    if not sent.failures:
        # All of them have it, so this cannot take long.
        work.wait()


class Meeting:
    """A store that listens at `port` of one address only; the group's ranks meet there."""

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
        # Where `dist.broadcast` looks up the source's rank in the group.
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
