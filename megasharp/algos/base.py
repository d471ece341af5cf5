"""The contract every method fills: its parameters, what it needs, and the hooks it may override.

A method overrides only the hooks it changes, so its file is its difference from GRPO. Hooks see flat per-token
tensors (`TokenInputs`), never logits and never a process group. Hooks before the update (up to `prepare`) see the whole
step at once, so that what they compute does not depend on packing; hooks of the loss see one micro-batch at a time.
`megasharp.algos.recipe` applies a list of methods in the order of the hooks. `gated` stands here because methods and
metrics share it: it picks the tokens at which the policy is least sure.

A suffix names a tensor's axes: G the scored responses of one group, S sequences, T response tokens, N candidates
a token. Token tensors have the learner's dtype, rewards and advantages before the update are float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import IntEnum, StrEnum
from linecache import getlines
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field
from torch import Tensor

from megasharp.common.records import Group, Plausible, TokenInputs
from megasharp.common.section import Section
from megasharp.ops.segment import segment_broadcast, segment_quantile

if TYPE_CHECKING:
    from megasharp.algos.dlc import MemoryParams


class Reduction(StrEnum):
    """The rule by which per-token losses become one number; its counts are of the whole optimizer step."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    TOKEN_SUM_OVER_CONSTANT = "token_sum_over_constant"


class OldLogp(IntEnum):
    """The point at which the log-probs of the policy before the update are needed.

    IN_LOSS: only inside the loss; on the first optimizer step they equal the current ones, so no extra pass is due.
    BEFORE_STEP: by `calibrate` or `prepare`, hence before the first forward of the update.
    """

    NONE = 0
    IN_LOSS = 1
    BEFORE_STEP = 2


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """A memory network beside the policy: `network` says where it begins and how it learns, the rest is its use.

    Tokens are drawn from softmax((z_policy - mu z_memory) / temperature); `plausible` is `SamplingParams.plausible`.
    `window`: the network attends to the prompt and to so many last tokens, the query's own included; None: to all.
    """

    network: MemoryParams
    mu: float
    plausible: Plausible | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that a method reads. Their union over a recipe decides which passes run and which fields are present.

    `topn`: how many of the most probable candidates, at least. `draw`: a uniform number per token. `gate`: the quantile
    of a response's entropies above which a position counts as gated, where a method has one.
    `refill_rounds`: how many further rounds of prompts may be sampled in place of groups that `select` dropped.
    """

    old_logp: OldLogp = OldLogp.NONE
    ref_logp: bool = False
    entropy: bool = False
    entropy_gradient: bool = False
    old_entropy: bool = False
    topn: int = 0
    sampler_logp: bool = False
    policy_logp: bool = False
    draw: bool = False
    refill_rounds: int = 0
    gate: float | None = None
    memory: MemoryNeed | None = None

    @property
    def annotation_fields(self) -> frozenset[str]:
        """The fields of `TokenInputs` that passes before the update fill."""
        asked = {
            "old_logp_T": self.old_logp is not OldLogp.NONE,
            "old_entropy_T": self.old_entropy,
            "ref_logp_T": self.ref_logp,
        }
        return frozenset(name for name, wanted in asked.items() if wanted)

    def __or__(self, other: Needs) -> Needs:
        single = ("gate", "memory")
        merged = {
            f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name not in single
        }
        gate = other.gate if self.gate is None else self.gate
        return Needs(**merged, gate=gate, memory=self.memory or other.memory)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetric:
    """A metric over tokens: its average is `sum(value_T * weight_T) / sum(weight_T)` over the whole step."""

    value_T: Tensor
    weight_T: Tensor


TokenMetrics = Mapping[str, TokenMetric]
Stats = Mapping[str, Tensor]


class Ramp(Section):
    """A coefficient, never negative, that goes from `start` to `end` over `steps` training steps, then stays there."""

    start: float = Field(ge=0.0, description="Value of the coefficient in the first training step.")
    end: float = Field(ge=0.0, description="Value of the coefficient after steps training steps, held from then on.")
    steps: int = Field(ge=1, description="Number of training steps over which the coefficient changes.")
    shape: Literal["linear", "cosine"] = Field(
        default="linear",
        description="Shape of the change: linear, or cosine, which is slow at both ends.",
    )

    def at(self, step: int) -> float:
        """Return the value in training step `step`, from 1: the first has `start`, step `steps` + 1 has `end`."""
        done = min(step - 1, self.steps) / self.steps
        share = done if self.shape == "linear" else (1.0 - math.cos(math.pi * done)) / 2.0
        return self.start + share * (self.end - self.start)


class MethodParams(Section):
    """Base of every method's parameter table. A parameter of type `float | Ramp` may change with the step."""

    def at(self, step: int) -> Self:
        """Return these parameters in training step `step`, from 1: every ramp replaced by its value."""
        ramps = {name: value.at(step) for name, value in self if isinstance(value, Ramp)}
        return self.model_copy(update=ramps) if ramps else self


# A parameter that is never negative: a number, or a ramp over the training steps.
Coefficient = Annotated[float, Field(ge=0.0)] | Ramp


def settled(value: float | Ramp) -> float:
    """Return a coefficient after `MethodParams.at`; a ramp that was not settled counts with its start."""
    return value.start if isinstance(value, Ramp) else value


ParamsT = TypeVar("ParamsT", bound=MethodParams)


class Method(Generic[ParamsT]):
    """Base of every method. A recipe runs the hooks that a method overrides; the others it skips.

    - `paper` and `status` are shown in tables: the source, empty where there is none, and how much of the formula is
      printed there.
    - `options` ends the description of the method's table among a recipe's keys: "Options of NAME: ..." or "NAME has
      no options: ...".
    - `Params` is the table of its parameters, `reduction` the averaging of losses that it prescribes, if any.
    - `brings` names methods that come along, with the values that this one sets in their tables; a user's own values
      win. A method that only brings others is a bundle.
    - `corrects`: the update allows for samples of another policy than the present one; a recipe has one such method.
    """

    paper: ClassVar[str] = ""
    status: ClassVar[str] = "as printed"
    options: ClassVar[str]
    Params: ClassVar[type[MethodParams]] = MethodParams
    reduction: ClassVar[Reduction | None] = None
    brings: ClassVar[Mapping[str, MethodParams]] = {}
    corrects: ClassVar[bool] = False

    def __init__(self, params: ParamsT) -> None:
        self.params = params

    def at(self, step: int) -> Self:
        """Return this method in training step `step`, from 1, its ramps settled."""
        return type(self)(self.params.at(step))

    def within(self, response_limit: int) -> Self:
        """Return this method in a run whose responses end after `response_limit` tokens at the latest.

        Parameters that stand relative to that limit are settled here. Raises UserError where they do not fit it.
        """
        return self

    def beside(self, needs: Needs) -> Self:
        """Return this method in a recipe whose methods together have these needs; parameters left open are settled."""
        return self

    def needs(self) -> Needs:
        """Return the inputs that this method reads, given its parameters."""
        return Needs()

    def reshapes_rewards(self) -> bool:
        """Tell if, with these parameters, estimators see other rewards than the verdicts'."""
        return "rewards" in overridden_hooks(type(self))

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Return why this method excludes `other`, called `name`, from its recipe; None where it does not."""
        return None

    def select(self, groups: Sequence[Group]) -> list[str | None]:
        """Return, for each group of one collection, None to keep it, or the reason to drop it, which is counted."""
        raise NotImplementedError

    def rewards(self, group: Group, rewards_G: Tensor) -> Tensor:
        """Reshape rewards: float64 [G] in and out. `group` holds the scored responses alone, in their order."""
        raise NotImplementedError

    def advantages(self, rewards_G: Tensor, group: Group) -> Tensor:
        """Estimate one advantage a response: float64 [G] in and out. Exactly one method of a recipe has this hook."""
        raise NotImplementedError

    def turn_advantages(self, rewards_G: Tensor, group: Group) -> list[Tensor]:
        """Estimate an advantage for each turn of each response, float64 [K]; an estimator may have this hook too."""
        raise NotImplementedError

    def calibrate(self, adv_T: Tensor, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Change advantages [T], float64, token by token before the update. `x` is the whole training step."""
        raise NotImplementedError

    def prepare(self, adv_T: Tensor, x: TokenInputs) -> Stats:
        """Compute statistics over one optimizer step, before it. `x` is that step, `adv_T` [T] is calibrated."""
        raise NotImplementedError

    def log_ratio(self, logr_T: Tensor, x: TokenInputs, adv_T: Tensor) -> Tensor:
        """Change the log importance ratio [T], log pi - log pi_old in nats, before the clip."""
        raise NotImplementedError

    def direction(self, logp_T: Tensor, x: TokenInputs, adv_T: Tensor) -> tuple[Tensor, TokenMetrics]:
        """Return a log-prob [T] of the same value with another gradient."""
        raise NotImplementedError

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return the unreduced loss per token [T]. Exactly one method of a recipe has this hook."""
        raise NotImplementedError

    def weight(self, x: TokenInputs, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return a factor [T] on the surrogate per token, without gradient."""
        raise NotImplementedError

    def correction(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return a factor [T] on the surrogate for a sampler that is not the policy, without gradient."""
        raise NotImplementedError

    def penalty(self, x: TokenInputs) -> tuple[Tensor, TokenMetrics]:
        """Return a term [T] that is added to the loss per token."""
        raise NotImplementedError


HOOKS = (
    "select",
    "rewards",
    "advantages",
    "turn_advantages",
    "calibrate",
    "prepare",
    "direction",
    "log_ratio",
    "surrogate",
    "weight",
    "correction",
    "penalty",
)
EXCLUSIVE_HOOKS = ("advantages", "surrogate")


def overridden_hooks(method: type[Method[Any]]) -> tuple[str, ...]:
    """Return the hooks that a method fills, in the order in which they are applied."""
    return tuple(hook for hook in HOOKS if getattr(method, hook) is not getattr(Method, hook))


def misspelt_hook(method: type[Method[Any]]) -> tuple[str, str, str] | None:
    """Return a function of a method that looks like a hook under another name, its file and that hook; or None.

    It looks like one where its name is near the hook's, it takes as many values, and the files of the method's classes
    have the name nowhere behind a dot, as in a call, or in quotes, as in `getattr`. So helpers that are called,
    properties, static functions and private names pass.
    """
    spaces = [vars(each) for each in method.__mro__ if issubclass(each, Method) and each is not Method]
    functions = {name: own for space in spaces for name, own in space.items() if isinstance(own, FunctionType)}
    source = "".join("".join(getlines(file)) for file in {own.__code__.co_filename for own in functions.values()})
    for name, own in functions.items():
        near = [] if name.startswith("_") or hasattr(Method, name) else get_close_matches(name, HOOKS, 1, cutoff=0.8)
        for hook in near:
            alike = own.__code__.co_argcount == getattr(Method, hook).__code__.co_argcount
            # A class that was typed at a prompt has no source to look into.
            if alike and source and not re.search(rf"\.{name}\b|(['\"]){name}\1", source):
                return name, Path(own.__code__.co_filename).name, hook
    return None


DEFAULT_QUANTILE = 0.8


def gated(x: TokenInputs, quantile: float) -> Tensor:
    """Return bool [T]: unmasked tokens whose entropy is above the `quantile` of their response's unmasked tokens.

    CaSP's gate (2510.14807, appendix E.1); entropies are in nats, of the current policy.
    The comparison is strict, so of equal entropies none passes the threshold they set, and a response of one token is
    not gated. By definition 0 gates every unmasked token, and 1 none.
    """
    assert x.entropy_T is not None
    scored_T = x.mask_T > 0
    if quantile == 0.0:
        return scored_T
    # In float64: a rank that is a whole number must not fall between two tokens by rounding.
    entropy_T = x.entropy_T.detach().double()
    threshold_S = segment_quantile(entropy_T, x.seq_T, x.num_sequences, quantile, x.mask_T)
    return (entropy_T > segment_broadcast(threshold_S, x.seq_T)) & scored_T
