"""What a push asks of a learner whose ranks send for themselves; imports no learner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from megasharp.common.records import MEMORY_PREFIX
from megasharp.convert.shards import TensorView
from megasharp.weight_sync.endpoints import WeightSource

Answer = TypeVar("Answer")


class Place(Protocol):
    """Where a rank stands: its pipeline stage, and whether it speaks for that stage's weights."""

    @property
    def pp(self) -> int: ...

    @property
    def exports(self) -> bool: ...


class RankPart(Protocol):
    """One rank's part of a learner."""

    @property
    def place(self) -> Place: ...

    @property
    def device(self) -> torch.device: ...

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This stage's whole tensors, on the rank that exports or on every one; all of the stage iterate to the end."""
        ...


@runtime_checkable
class LendingPart(RankPart, Protocol):
    """A part whose weights others on the machine can read where they lie."""

    @property
    def weights_stay(self) -> bool:
        """Whether the weights' memory stays where it is between pushes, as far as is known."""
        ...

    def weights_state(self) -> Hashable:
        """Something that differs whenever the weights' memory may have moved."""
        ...

    def weight_views(self) -> list[TensorView] | None:
        """All that this rank holds of the whole model, in the parameters' memory; None where it does not lie there."""
        ...


@runtime_checkable
class RankedSource(WeightSource, Protocol):
    """A learner over ranks."""

    def apply(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call a module's `function(part, *args)` on every rank; results in rank order."""
        ...


def ranked(source: WeightSource, memory: WeightSource | None) -> list[tuple[str, RankedSource]]:
    """The networks of a push as such learners, each with the prefix of its names; the policy is the first."""
    named = [("", source)] if memory is None else [("", source), (MEMORY_PREFIX, memory)]
    for _, each in named:
        assert isinstance(each, RankedSource), f"{type(each).__name__} has no ranks that could send"
    return [(prefix, cast(RankedSource, each)) for prefix, each in named]


def only(answers: Sequence[Answer | None]) -> Answer:
    """The answer of the one rank that has one."""
    [answer] = [answer for answer in answers if answer is not None]
    return answer


def stage_of(part: RankPart) -> int | None:
    """The pipeline stage that a rank speaks for; None where it speaks for none."""
    return part.place.pp if part.place.exports else None
