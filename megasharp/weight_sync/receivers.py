"""The engines that take part in a push: what all transports have them do, and what becomes of those that fail.

An engine that fails or refuses any part of a push is lost: it may hold half of the new weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megasharp.common.errors import RunFailed
from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import Header, Stamp
from megasharp.rollout.sglang.client.api import CONTROL_S, EngineApi, EngineFailed, Refused
from megasharp.rollout.sglang.client.health import Lost
from megasharp.rollout.sglang.client.members import Member, Members
from megasharp.weight_sync.buckets import Digests, difference


@dataclass(frozen=True, slots=True)
class Wrong:
    """An engine did what it was asked, and the result is wrong."""

    message: str


Action = Callable[[EngineApi], Refused | Wrong | None]


class Receivers:
    """All engines of a fleet that are alive; `tp` is the number of ranks of each.

    An engine that does not answer a call within `config.limit_s` seconds is lost.
    """

    def __init__(self, members: Members, tp: int, config: SyncConfig) -> None:
        self._members = members
        self.tp = tp
        self._limit_s = config.limit_s
        # For calls that move no weights.
        self._control_s = min(CONTROL_S, config.limit_s)
        self._in_flight = config.in_flight

    def alive(self) -> list[Member]:
        """Engines that are not lost. Raises UserError when none is left."""
        alive = self._members.alive()
        if not alive:
            raise self._members.none_left()
        return alive

    def each(self, what: str, action: Action) -> None:
        """Have every engine alive do `action` at the same time; one that fails is lost.

        Raises RunFailed when none is left, with what each said.
        """
        taking = self.alive()
        with ThreadPoolExecutor(len(taking)) as pool:
            failures = list(pool.map(lambda member: _attempt(member, action), taking))
        said = []
        for member, failure in zip(taking, failures, strict=True):
            if failure is not None:
                said.append(self.lose(member, f"{what}: {failure}"))
        if len(said) == len(taking):
            raise RunFailed(f"no engine is left that takes weights; {what} failed: {'; '.join(said)}")

    def lose(self, member: Member, reason: str) -> str:
        """Give an engine up, and kill it; returns its name and fate."""
        self._members.observe(member, Lost(reason))
        return f"{member.name}: {self._members.describe(member)}"

    def pause(self) -> None:
        """Stop sampling. Engines that sleep sample nothing."""
        if not self._members.asleep:
            self.each("pause", lambda api: api.pause(self._in_flight, self._control_s))

    def start(self) -> None:
        """Stop sampling and open a weight update."""
        self.pause()
        self.each("begin of the weight update", lambda api: api.begin_update(self._control_s))

    def end(self, stamp: Stamp) -> None:
        """Have engines check that all weights have come, label them with their version, and close the weight update."""
        closing = Header(stamp).to_json()
        self.each("close of the version", lambda api: api.announce(closing, self.tp, self._limit_s, stamp.version))
        self.each("end of the weight update", lambda api: api.end_update(self._limit_s))

    def compare(self, digests: Digests) -> None:
        """Check that every engine holds what was sent, as far as digests were taken; one that does not is lost."""

        def held(api: EngineApi) -> Wrong | Refused | None:
            answer = api.checksums(self._limit_s)
            if isinstance(answer, Refused):
                return answer
            wrong = difference(digests.by_name, answer)
            return None if wrong is None else Wrong(wrong)

        if digests.by_name:
            self.each("comparison of checksums", held)

    def go_on(self) -> None:
        """Sample again. Caches were computed with the old weights: they are emptied, unless requests went on in place.

        Engines that sleep have forgotten already, and go on when they wake.
        """
        if self._members.asleep:
            return
        if self._in_flight == "retract":
            self.each("flush of the cache", lambda api: api.flush(self._control_s))
        self.each("continue", lambda api: api.proceed(self._control_s))

    def release(self) -> None:
        """Have engines that were stopped in the middle of a push go on; whether they do is the watch's matter."""
        for member in self._members.alive():
            actions = (EngineApi.end_update,) if self._members.asleep else (EngineApi.end_update, EngineApi.proceed)
            for action in actions:
                with contextlib.suppress(EngineFailed):
                    action(member.process.api, self._control_s)


def _attempt(member: Member, action: Action) -> str | None:
    """Return what went wrong, or None."""
    try:
        answer = action(member.process.api)
    except EngineFailed as error:
        return member.process.exit_reason() or str(error)
    match answer:
        case Refused(message):
            return f"refused: {message}"
        case Wrong(message):
            return message
    return None
