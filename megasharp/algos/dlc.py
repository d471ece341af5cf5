"""DLC: distribution-level calibration by decoupled sampling (arXiv 2601.15609, section 4.2).

    pi_calib(y_t = v | x, y_<t) = softmax_v( z_policy(v) - mu z_memory(v) )

A memory network learns, by one cross-entropy step per training step on every sampled response, what the policy has
been saying; sampling subtracts its logits, so that often sampled modes are drawn less. Only sampling changes: there is
no hook here, the loss is the recipe's own, and the importance ratio stays pi / pi_old of the policy.

    memory's loss = - mean over response tokens of log pi_memory(y_t | x, y_<t)

Printed: the formula in words, the cross-entropy update every step, the policy's learning rate for the memory network
(`memory.lr: null`; the default is ten times that, decision 0048). Not said: how the memory begins, which samples
it learns from, where the temperature stands, and mu, whose value is lost in the text: 0.2 is a proposal, 0 is plain
sampling.
Derived (ours): the temperature divides the difference, softmax((z_policy - mu z_memory) / T); the memory learns from
response tokens of all responses, correct or not. Nothing corrects the ratio for the subtraction by default, because a
weight against the sampler makes the expected update on-policy again and undoes the effect; stale samples are corrected
against the policy (`recipe.correction`).
`plausible` is a guard that is ours and not the paper's, off by default: only tokens that the policy alone finds
plausible are drawn, where subtraction would raise tokens that both networks hold impossible. It is judged before the
subtraction, and takes one of two forms:

    plausible: {min_p: 0.1}     tokens with at least a tenth of the likeliest token's probability at the temperature
    plausible: {top_k: 20}      the 20 likeliest tokens

`window` is ours as well, and off by default: the memory network then attends to the prompt and to the last tokens
alone, when it samples and when it learns (decision 0047).

The memory's cross-entropy is no method of the table, because it is no way to train a policy on rewards.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from megasharp.algos.base import (
    Coefficient,
    MemoryNeed,
    Method,
    MethodParams,
    Needs,
    Reduction,
    Stats,
    TokenMetric,
    TokenMetrics,
    settled,
)
from megasharp.algos.recipe import Recipe
from megasharp.common.records import Plausible, TokenInputs
from megasharp.common.section import Section


class CrossEntropy(Method[MethodParams]):
    """The loss of the memory network: minus the log-prob of each sampled token."""

    paper = "2601.15609"

    def surrogate(self, x: TokenInputs, logr_T: Tensor, adv_T: Tensor, stats: Stats) -> tuple[Tensor, TokenMetrics]:
        """Return -log pi_memory(y_t), [T], nats (2601.15609, section 4.2); ratio and advantage are not read."""
        assert x.logp_T is not None
        return -x.logp_T, {"memory/cross_entropy": TokenMetric(-x.logp_T.detach(), x.mask_T)}


def cross_entropy_recipe() -> Recipe:
    """Return the recipe of one supervised step of the memory network; it has no estimator of advantages."""
    return Recipe({"cross_entropy": CrossEntropy(MethodParams())}, Reduction.TOKEN_MEAN, constant=1.0, mini_batches=1)


class MemoryParams(Section):
    """The memory network: its starting weights, and how it learns. Runs resumed from before keep what they had."""

    path: str = Field(
        default="examples/quickstart/memory",
        description="The memory network's starting weights, in any form that model.path takes, with the policy's "
        "vocabulary. The default is the quickstart's; set your own for any other model.",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of the model that path names on the hub. null: its main branch.",
    )
    start: Literal["pretrained", "cold"] = Field(
        default="pretrained",
        description="First weights: pretrained takes those in path; cold draws new ones from the run's seed for the "
        "model that path's config.json describes, the same under every layout. A cold network says nothing at first, "
        "so the subtraction only takes back what was sampled in this run.",
    )
    lr: float | str | None = Field(
        default="10x",
        description="Peak learning rate of the memory network: a number, or as 10x a multiple of policy.optimizer.lr. "
        "With policy.lora give a number: its rate suits adapters, and the memory network is trained whole. null: the "
        "policy's own, the paper's value, at which the memory network lags behind the policy where advantages are "
        "normalised. Raise it while memory/cross_entropy stays above entropy/policy; lower it when "
        "memory/cross_entropy is unsteady.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Number of the memory network's own optimizer steps over which its learning rate rises linearly "
        "from 0 to lr. 0: no warm-up; the policy's does not count.",
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Schedule of the memory network's learning rate after its warm-up, by the names of "
        "policy.optimizer.decay. constant keeps up with the policy until the end; linear and cosine reach 0 at the "
        "memory network's last optimizer step.",
    )
    steps: int = Field(
        default=1,
        ge=1,
        description="Number of the memory network's optimizer steps per training step. The groups are shared out over "
        "them, each is learned once, so more steps follow faster at the same cost. At most data.prompts_per_step.",
    )
    replay: int = Field(
        default=0,
        ge=0,
        description="Number of earlier training steps whose responses are learned again beside the new ones, with "
        "equal weight per token. Each costs a pass more, and 4 bytes of the driver's memory and of each checkpoint per "
        "token. Raise it where steps are small. 0: every response is learned once.",
    )
    freeze_until: int = Field(
        default=0,
        ge=0,
        description="Last training step in which the memory network does not learn. Sampling subtracts the frozen "
        "network all the same. 0: it learns from the first step on; the run's last step: never.",
    )

    def rate(self, policy: float) -> float:
        """Return the peak learning rate beside a policy's."""
        match self.lr:
            case None:
                return policy
            case str(ratio):
                return float(ratio.removesuffix("x")) * policy
            case lr:
                return lr

    @field_validator("lr")
    @classmethod
    def _is_positive(cls, lr: float | str | None) -> float | str | None:
        if isinstance(lr, str) and not re.fullmatch(r"\d+(\.\d+)?x", lr):
            raise ValueError("give a number, a multiple of policy.optimizer.lr such as 10x, or null")
        if lr is not None and cls.model_construct(lr=lr).rate(1.0) <= 0.0:
            raise ValueError("it must be above 0")
        return lr

    @model_validator(mode="before")
    @classmethod
    def _without_tp(cls, tree: Any) -> Any:
        """Leave out `tp`, which stored configurations until fc02a83 (2026-11-21) have and which never did anything."""
        return {key: value for key, value in tree.items() if key != "tp"} if isinstance(tree, dict) else tree


class PlausibleParams(Section):
    """The guard, ours: `records.Plausible`."""

    min_p: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Smallest probability of a token that may be drawn, as a share of the most likely token's, judged "
        "before the subtraction. Give either this or top_k; null: not used.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Number of the policy's most likely tokens that may be drawn, judged before the subtraction. Give "
        "either this or min_p; null: not used.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.min_p is None) == (self.top_k is None):
            raise ValueError("give one of min_p and top_k")
        return self


class DLCParams(MethodParams):
    """`mu` weighs the memory's logits, which are subtracted; it may change with the step."""

    mu: Coefficient = Field(
        default=0.2,
        description="Factor of the memory network's logits that sampling subtracts, a number or a ramp. The paper's "
        "value is unknown; 0.2 is a proposal. 0: plain sampling.",
    )
    memory: MemoryParams = Field(
        default=MemoryParams(),
        description="Memory network: its starting weights, and how it learns what is sampled.",
    )
    plausible: PlausibleParams | None = Field(
        default=None,
        description="Guard, not in the paper: only tokens that the policy alone finds plausible may be drawn, by "
        "min_p or top_k. null: no guard.",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description="Number of last tokens, the newest included, that the memory network attends to beside the whole "
        "prompt; it forgets what lies between, in sampling and in learning, so that its KV cache stays small at long "
        "responses. SGLang engines on GPUs refuse it. Not in the paper. null: all tokens.",
    )


class DLC(Method[DLCParams]):
    """Sampling with a memory network's logits subtracted."""

    paper = "2601.15609"
    status = "formula printed in words; mu and the temperature's place unknown"
    options = "sampling with a memory network's logits subtracted."
    Params = DLCParams

    def needs(self) -> Needs:
        """Ask for the memory network, with this step's `mu`, the guard and the window, if any."""
        guard, window = self.params.plausible, self.params.window
        plausible = None if guard is None else Plausible(guard.min_p, guard.top_k)
        return Needs(memory=MemoryNeed(self.params.memory, settled(self.params.mu), plausible, window))
