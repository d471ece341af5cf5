"""What the fleet believes of one engine: a pure state machine over probe answers, missed probes and process exits.

    STARTING --answered--> SERVING          (or STALE, where it holds other weights than wanted)
    SERVING  --missed----> SUSPECT          gets no new requests until it answers again
    SERVING  --doubted---> SUSPECT          a request failed; whether the engine is at fault is for the probes to say
    any      --missed too often, exited---> DEAD, for good
    any      --other weights wanted-------> STALE until it answers with the wanted version

An engine that misses while it starts is still starting: how long a start may take is the launcher's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Condition(StrEnum):
    """Only a SERVING engine gets requests."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Answered:
    """A probe was answered; `version` is the weights' version that the engine says it serves."""

    version: int


@dataclass(frozen=True, slots=True)
class Missed:
    """A probe went unanswered, or was answered with an error of the server's own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """A request failed. Many fail at the same moment, so they do not count as misses."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The process ended by itself (`ended`), or what the engine holds can no longer be known."""

    reason: str
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """From now on only weights of this version may be served; whatever the engine holds is taken for older."""

    version: int


Event = Answered | Missed | Doubted | Lost | Wanted


@dataclass(frozen=True, slots=True)
class Health:
    """One engine's state. `missed` counts the probes missed in a row; `reason` says why it is suspect or dead.

    `ended`: its process ended by itself.
    """

    condition: Condition = Condition.STARTING
    wanted: int = -1
    missed: int = 0
    reason: str = ""
    ended: bool = False

    @property
    def serving(self) -> bool:
        """Whether the engine may get requests."""
        return self.condition is Condition.SERVING

    @property
    def alive(self) -> bool:
        """Whether the engine is not given up."""
        return self.condition is not Condition.DEAD


def after(health: Health, event: Event, dead_after: int) -> Health:
    """The state after an event; `dead_after` is the number of misses in a row that make an engine dead."""
    if not health.alive:
        return health
    match event:
        case Lost(reason, ended):
            return replace(health, condition=Condition.DEAD, reason=reason, ended=ended)
        case Answered(version):
            condition = Condition.SERVING if version == health.wanted else Condition.STALE
            return replace(health, condition=condition, missed=0, reason="")
        case Missed(reason):
            return _missed(health, reason, dead_after)
        case Doubted(reason):
            serving = health.condition is Condition.SERVING
            return replace(health, condition=Condition.SUSPECT, reason=reason) if serving else health
        case Wanted(version):
            starting = health.condition is Condition.STARTING
            return replace(health, wanted=version, condition=Condition.STARTING if starting else Condition.STALE)


def _missed(health: Health, reason: str, dead_after: int) -> Health:
    if health.condition is Condition.STARTING:
        return health
    missed = health.missed + 1
    if missed >= dead_after:
        return replace(health, condition=Condition.DEAD, missed=missed, reason=reason)
    # A stale engine that misses stays stale: the answer that ends its suspicion would not make its weights newer.
    condition = Condition.STALE if health.condition is Condition.STALE else Condition.SUSPECT
    return replace(health, condition=condition, missed=missed, reason=reason)
