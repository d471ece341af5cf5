"""What a step asks of its rollouts, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from megasharp.types import Group, Plausible, Prompt


class PromptSource(Protocol):
    """Endless prompts."""

    def take(self, count: int) -> list[Prompt]: ...


class MemoryUse(Protocol):
    """What sampling does with a memory network: `SamplingParams.memory_mu` and `SamplingParams.plausible`."""

    @property
    def mu(self) -> float: ...

    @property
    def plausible(self) -> Plausible | None: ...


@dataclass(frozen=True, slots=True)
class Order:
    """One step's groups: `wanted` kept ones, after `select` and up to `refill_rounds` further rounds of prompts.

    `select` sets `dropped_reason` of the groups it refuses, each judged by itself. `memory` says how much of the memory
    network's logits is subtracted; None samples from the policy alone. `last`: no step follows. A response has at most
    `max_tokens` tokens; None is what the rollouts were made with.
    """

    step: int
    wanted: int
    select: Callable[[list[Group]], list[Group]]
    refill_rounds: int = 0
    memory: MemoryUse | None = None
    last: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's groups in the order of their prompts, dropped ones included.

    `seconds` is by stage: `rollout`, and `reward`, which is everything from text to verdict; they do not overlap.
    `figures` are the collection's own, as they stand in the metrics.
    """

    groups: list[Group]
    seconds: Mapping[str, float]
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """How far collection may run ahead of the weights.

    `oversample` is the share of prompts sampled beyond those wanted; those unfinished when enough groups are there are
    stragglers. `abort` ends them, so that nothing is in flight between two steps; `keep` lets them go on while the
    policy learns, and starts the next step's prompts besides. A trained token is at most `max_staleness` versions older
    than the policy that trains on it.
    """

    oversample: float = 0.0
    max_staleness: int = 0
    stragglers: Literal["abort", "keep"] = "abort"

    def __post_init__(self) -> None:
        assert self.stragglers == "abort" or self.max_staleness > 0, "what is kept is sampled by earlier weights"
