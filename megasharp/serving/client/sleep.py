"""Engines that give their device's memory to the learner and take it back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megasharp.serving.client.api import EngineApi, EngineFailed, Refused
from megasharp.serving.client.health import Lost
from megasharp.serving.client.members import Member, Members


class Sleeper:
    """All engines of a fleet sleep and wake together; one that does not is lost. All must be idle.

    A request between `sleep` and the last `wake` would find an engine without memory: who calls keeps them apart.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def sleep(self) -> None:
        """Free weights and cache. What they held is lost, so the next `wake_weights` must be followed by a push."""
        self._members.let_sleep(True)
        # The flush waits for what has just ended, a probe's token too.
        self._each("flush before sleep", lambda api: api.flush())
        self._each("sleep", lambda api: api.release(("weights", "kv_cache")))

    def rest(self) -> None:
        """Free the cache only."""
        self._members.let_sleep(True)
        self._each("flush before sleep", lambda api: api.flush())
        self._each("sleep", lambda api: api.release(("kv_cache",)))

    def wake_weights(self) -> None:
        """Take memory for weights again, for a push to fill."""
        self._each("wake", lambda api: api.resume(("weights",)))

    def wake_cache(self) -> None:
        """Take the cache's memory again: the engines can sample."""
        self._each("wake", lambda api: api.resume(("kv_cache",)))
        self._members.let_sleep(False)

    def _each(self, what: str, action: Callable[[EngineApi], Refused | None]) -> None:
        """Raises UserError when no engine is left."""
        taking = self._members.alive()
        if not taking:
            raise self._members.none_left()
        with ThreadPoolExecutor(len(taking)) as pool:
            list(pool.map(lambda member: self._one(member, what, action), taking))
        if not self._members.alive():
            raise self._members.none_left()

    def _one(self, member: Member, what: str, action: Callable[[EngineApi], Refused | None]) -> None:
        try:
            refused = action(member.process.api)
        except EngineFailed as error:
            ended = member.process.exit_reason()
            self._members.observe(member, Lost(f"{what}: {ended or error}", ended=ended is not None))
            return
        if refused is not None:
            self._members.observe(member, Lost(f"{what}: refused: {refused.message}"))
