"""The contract every method fills: its parameters, what it needs, and the hooks it may override.

A method overrides only the hooks it changes, so its file is its difference from GRPO. Hooks see flat per-token
tensors (`TokenInputs`), never logits and never a process group. `megasharp.algos.recipe` applies a list of methods
in the order of the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from megasharp.config.core import Section
from megasharp.types import Group, MicroBatch, TokenInputs


class Reduction(StrEnum):
    """How per-token losses become one number; always with counts over the whole optimizer step."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    TOKEN_SUM_OVER_CONSTANT = "token_sum_over_constant"


class OldLogp(IntEnum):
    """When the log-probs of the policy that is about to be updated are needed.

    IN_LOSS: only inside the loss; on the first optimizer step they equal the current ones, so no extra pass is due.
    BEFORE_STEP: by `calibrate` or `prepare`, hence before the first forward of the update.
    """

    NONE = 0
    IN_LOSS = 1
    BEFORE_STEP = 2


BatchStats = Literal["step", "microbatch"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method reads. The union over a recipe decides which passes run and which fields are present."""

    old_logp: OldLogp = OldLogp.NONE
    ref_logp: bool = False
    entropy: bool = False
    entropy_gradient: bool = False
    old_entropy: bool = False
    topn: int = 0
    sampler_logp: bool = False
    memory: bool = False
    whole_sequence: bool = False
    batch_stats: BatchStats | None = None

    def __or__(self, other: Needs) -> Needs:
        scopes = {self.batch_stats, other.batch_stats} - {None}
        merged = {f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)[:-1]}
        return Needs(**merged, batch_stats="microbatch" if "microbatch" in scopes else next(iter(scopes), None))


class Reduce(Protocol):
    """Statistics across ranks; the identity when one process holds the whole step."""

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over all ranks."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over all ranks."""
        ...


class LocalReduce:
    """One process holds everything."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetric:
    """A metric over tokens: its average is `sum(value_T * weight_T) / sum(weight_T)` over the whole step."""

    value_T: Tensor
    weight_T: Tensor


TokenMetrics = Mapping[str, TokenMetric]
Stats = Mapping[str, Tensor]


class MethodParams(Section):
    """Base of every method's parameter table."""


ParamsT = TypeVar("ParamsT", bound=MethodParams)


class Method(Generic[ParamsT]):
    """A named method with its parameters. Every hook here is the neutral one.

    `paper` is the source shown in tables; `reduction` is set by methods that prescribe one.
    """

    paper: ClassVar[str]
    Params: ClassVar[type[MethodParams]] = MethodParams
    reduction: ClassVar[Reduction | None] = None

    def __init__(self, params: ParamsT) -> None:
        self.params = params

    def needs(self) -> Needs:
        """What this method reads, given its parameters."""
        return Needs()

    def select(self, group: Group) -> str | None:
        """None keeps the group; a text drops it and is the reason that is counted."""
        raise NotImplementedError

    def rewards(self, group: Group, rewards_G: Tensor) -> Tensor:
        """Reshape a group's rewards, float64 [G]."""
        raise NotImplementedError

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """The estimator: float64 [G] in and out; exactly one method of a recipe has it."""
        raise NotImplementedError

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> Tensor:
        """Change advantages token by token, before the step."""
        raise NotImplementedError

    def prepare(self, micro_batches: Sequence[MicroBatch], reduce: Reduce) -> Stats:
        """Statistics over the scope that `needs().batch_stats` declares."""
        raise NotImplementedError

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Change the log importance ratio, log pi - log pi_old, before the clip."""
        raise NotImplementedError

    def direction(self, logp_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """A log-prob with the same value and another gradient."""
        raise NotImplementedError

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """The unreduced loss per token; exactly one method of a recipe has it."""
        raise NotImplementedError

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> Tensor:
        """A factor on the surrogate per token, without gradient."""
        raise NotImplementedError

    def correction(self, x: TokenInputs) -> Tensor:
        """A factor per token for a sampler that is not the policy, without gradient."""
        raise NotImplementedError

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """A term added to the loss per token."""
        raise NotImplementedError


HOOKS = (
    "select",
    "rewards",
    "advantages",
    "calibrate",
    "prepare",
    "log_ratio",
    "direction",
    "surrogate",
    "weight",
    "correction",
    "penalty",
)
EXCLUSIVE_HOOKS = ("advantages", "surrogate")


def overridden_hooks(method: type[Method[MethodParams]]) -> tuple[str, ...]:
    """The hooks a method fills, in the order in which they are applied."""
    return tuple(hook for hook in HOOKS if getattr(method, hook) is not getattr(Method, hook))
