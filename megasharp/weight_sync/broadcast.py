"""Weights to engines anywhere by broadcast: gloo on CPUs, NCCL on GPUs, one source per pipeline stage.

Groups are formed, and stages sent, one after another in the order of the stages: two sources that sent at the same time
could each wait for an engine that waits for the other. Groups live until the fleet changes.

When an engine fails in a push, it is found and given up, all groups are left, and the push begins anew without it. An
engine that hangs in a collective may hold others there that are behind it; they are asked in the order of their ranks,
so that the first that does not answer is the one at fault, and its end frees the others.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import torch

from megasharp.common.errors import RunFailed
from megasharp.rollout.sglang.bucket import Stamp, new_stamp
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed
from megasharp.rollout.sglang.client.members import Member
from megasharp.weight_sync.broadcast_rank import GroupPlan, SendPlan, Sent, join, leave, send
from megasharp.weight_sync.buckets import Digests
from megasharp.weight_sync.endpoints import WeightSource
from megasharp.weight_sync.rank_sources import RankedSource, only, ranked, stage_of
from megasharp.weight_sync.receivers import Receivers
from megasharp.weight_sync.settings import SyncSettings


class Broadcast:
    """Satisfies `Transport`; both networks must be `RankedSource`s over the same ranks."""

    def __init__(self, receivers: Receivers, settings: SyncSettings, dtype: torch.dtype) -> None:
        self._receivers = receivers
        self._settings = settings
        self._dtype = dtype
        self._groups: list[GroupPlan] = []

    def deliver(
        self, version: int, memory_version: int | None, source: WeightSource, memory: WeightSource | None
    ) -> None:
        """Push everything; begins anew without the engines that fail. Raises RunFailed when none is left."""
        parts = ranked(source, memory)
        mode, digests = self._settings.in_flight, Digests(self._settings.verify)
        try:
            self._receivers.start(mode)
            stamp = new_stamp(version, memory_version)
            while not self._attempt(stamp, parts, digests):
                stamp = new_stamp(version, memory_version)
            self._receivers.end(stamp)
            self._receivers.compare(digests)
            self._receivers.go_on(mode)
        except BaseException:
            # What is under way in a group would meet the next push.
            with contextlib.suppress(Exception):
                self._leave(parts[0][1])
            self._groups = []
            self._receivers.release()
            raise

    def _attempt(self, stamp: Stamp, parts: list[tuple[str, RankedSource]], digests: Digests) -> bool:
        """Whether every engine alive got everything; otherwise at least one of them is lost now."""
        policy = parts[0][1]
        for sent in self._carry_out(stamp, parts):
            if not sent.good:
                self._settle(sent, policy)
                return False
            digests.by_name |= sent.digests
        return True

    def _carry_out(self, stamp: Stamp, parts: list[tuple[str, RankedSource]]) -> Iterator[Sent]:
        """Form the groups where they are not those of the engines alive, then send; the outcomes, one by one."""
        policy = parts[0][1]
        engines = tuple((member.process.index, member.process.api) for member in self._receivers.alive())
        if not self._groups or self._groups[0].engines != engines:
            self._leave(policy)
            for stage in sorted({stage for stage in policy.apply(stage_of) if stage is not None}):
                plan = self._plan(stage, engines)
                self._groups.append(plan)
                yield only(policy.apply(join, plan))
        for prefix, part in parts:
            how = SendPlan(stamp, prefix, self._dtype, self._settings.bucket_mb, self._settings.verify)
            for plan in self._groups:
                yield only(part.apply(send, plan, how))

    def _plan(self, stage: int, engines: tuple[tuple[int, EngineApi], ...]) -> GroupPlan:
        return GroupPlan(
            stage=stage,
            # A name is free again only in a new process.
            name=f"megasharp-{stage}-{secrets.token_hex(4)}",
            backend=self._settings.transport,
            host=self._settings.host,
            engines=engines,
            tp=self._receivers.tp,
            join_s=min(self._settings.join_s, self._settings.limit_s),
            limit_s=self._settings.limit_s,
        )

    def _leave(self, policy: RankedSource) -> None:
        """Leave all groups, the engines' side as far as they still answer."""
        for plan in self._groups:
            policy.apply(leave, plan.name)
            for member in self._receivers.alive():
                with contextlib.suppress(EngineFailed):
                    member.process.api.leave_group(plan.name, self._settings.settle_s)
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
            policy.apply(leave, plan.name)
        for member in self._receivers.alive():
            self._have_leave(member, groups, sent)
        # The fleet's watch may have found who is dead before.
        if {number for number, _ in groups[0].engines} <= {m.process.index for m in self._receivers.alive()}:
            self._lose_who_failed_alone(sent)

    def _have_leave(self, member: Member, groups: list[GroupPlan], sent: Sent) -> None:
        """One that does not answer is stuck in a collective."""
        try:
            for plan in groups:
                member.process.api.leave_group(plan.name, self._settings.settle_s)
        except EngineFailed as error:
            failure = sent.failures.get(member.process.index)
            self._lose(member, failure.reason if failure else str(error))

    def _lose_who_failed_alone(self, sent: Sent) -> None:
        """Nobody is gone or stuck, so whoever failed did so for reasons of its own."""
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
