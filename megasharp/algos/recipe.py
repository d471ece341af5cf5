"""A recipe: a list of methods, applied in the order of the hooks.

The pipeline around it (loop, packing, learner) is blind to methods; it calls `advantages`, `calibrate`, `prepare` and
`loss`. Two methods that fill the same exclusive hook are refused when the recipe is built, naming both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from megasharp.algos import DEFAULT_SURROGATE, METHODS
from megasharp.algos.base import (
    EXCLUSIVE_HOOKS,
    LocalReduce,
    Method,
    MethodParams,
    Needs,
    OldLogp,
    Reduce,
    Reduction,
    Stats,
    TokenMetrics,
    overridden_hooks,
)
from megasharp.algos.planned import PLANNED
from megasharp.algos.reduction import token_coefficients
from megasharp.errors import UserError
from megasharp.types import (
    Denominators,
    Group,
    Mean,
    Metrics,
    MicroBatch,
    MiniBatch,
    Outcome,
    StepBatch,
    TokenInputs,
)
from megasharp.types import (
    Sequence as TrainSequence,
)

MiniBatchStats = tuple[Stats, ...]


class Recipe:
    """Methods in order, with one estimator, one surrogate and one reduction.

    `constant` is the horizon of `token_sum_over_constant`, in tokens. `mini_batches` is the number of optimizer steps
    per batch of rollouts; with one, the old log-probs of the loss equal the current ones and need no pass of their own.
    """

    def __init__(
        self, methods: Mapping[str, Method[Any]], reduction: Reduction, constant: float, mini_batches: int
    ) -> None:
        self.methods = dict(methods)
        self.reduction = reduction
        self.constant = constant
        self.mini_batches = mini_batches
        self.needs: Needs = fold(lambda a, b: a | b, (m.needs() for m in methods.values()), Needs())

    @property
    def annotation(self) -> Needs:
        """What must be computed by passes of their own before the update."""
        old = self.needs.old_logp
        in_loss_is_enough = old is OldLogp.IN_LOSS and self.mini_batches == 1
        return dataclasses.replace(self.needs, old_logp=OldLogp.NONE if in_loss_is_enough else old)

    def _filling(self, hook: str) -> list[Method[Any]]:
        return [m for m in self.methods.values() if hook in overridden_hooks(type(m))]

    def select(self, group: Group) -> str | None:
        """None keeps the group; otherwise the first refusing method's reason."""
        reasons = (method.select(group) for method in self._filling("select"))
        return next((reason for reason in reasons if reason is not None), None)

    def advantages(self, groups: Sequence[Group]) -> list[TrainSequence]:
        """One training sequence per response of every kept group; infra failures are masked, never scored."""
        return [sequence for group in groups if group.dropped_reason is None for sequence in self._sequences(group)]

    def _sequences(self, group: Group) -> list[TrainSequence]:
        scored = [r.verdict.outcome is not Outcome.INFRA for r in group.responses]
        kept = dataclasses.replace(
            group, responses=tuple(r for r, keep in zip(group.responses, scored, strict=True) if keep)
        )
        rewards_G = torch.tensor([r.verdict.reward for r in kept.responses], dtype=torch.float64)
        for method in self._filling("rewards"):
            rewards_G = method.rewards(kept, rewards_G)
        (estimator,) = self._filling("advantages")
        advantages = iter(estimator.advantages(rewards_G, kept).tolist() if kept.responses else [])
        return [_sequence(group, index, next(advantages) if keep else 0.0, keep) for index, keep in enumerate(scored)]

    def calibrate(self, batch: StepBatch) -> StepBatch:
        """Apply every `calibrate` hook to the advantages of each micro-batch."""
        methods = self._filling("calibrate")
        if not methods:
            return batch
        mini_batches = tuple(
            dataclasses.replace(
                mini,
                per_rank=tuple(tuple(self._calibrated(m, methods) for m in rank) for rank in mini.per_rank),
            )
            for mini in batch.mini_batches
        )
        return dataclasses.replace(batch, mini_batches=mini_batches)

    def _calibrated(self, micro: MicroBatch, methods: Sequence[Method[Any]]) -> MicroBatch:
        adv_T = micro.advantage_T
        for method in methods:
            adv_T = method.calibrate(adv_T, micro.inputs)
        return dataclasses.replace(micro, advantage_T=adv_T)

    def prepare(self, mini: MiniBatch, reduce: Reduce | None = None) -> MiniBatchStats:
        """Every method's statistics over one mini-batch, in the order of the methods."""
        held = [micro for rank in mini.per_rank for micro in rank]
        filling = self._filling("prepare")
        return tuple(
            method.prepare(held, reduce or LocalReduce()) if method in filling else {}
            for method in self.methods.values()
        )

    def loss(
        self, micro: MicroBatch, x: TokenInputs, denominators: Denominators, stats: MiniBatchStats
    ) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the step's loss (shares add up to it), and its metrics.

        `x` is `micro.inputs` with the learner's `logp_T` (and what else `needs` asks for) filled in.
        """
        x = _scored_only(x)
        adv_T = _scored(micro.advantage_T.detach().to(x.mask_T.dtype), x.mask_T)
        loss_T, metrics = self._token_loss(x, adv_T, stats)
        coefficient_T = token_coefficients(self.reduction, x.mask_T, x.seq_T, micro.length_S, denominators)
        return (loss_T * coefficient_T).sum(), {name: _mean(m.value_T, m.weight_T) for name, m in metrics.items()}

    def _token_loss(self, x: TokenInputs, adv_T: Tensor, stats: MiniBatchStats) -> tuple[Tensor, TokenMetrics]:
        assert x.logp_T is not None
        by_method = dict(zip(self.methods.values(), stats, strict=True))
        directed_T = x.logp_T
        for method in self._filling("direction"):
            directed_T = method.direction(directed_T, x, adv_T)
        old_T = x.old_logp_T if x.old_logp_T is not None else x.logp_T.detach()
        logr_T = directed_T - old_T
        for method in self._filling("log_ratio"):
            logr_T = method.log_ratio(logr_T, x, adv_T)
        (surrogate,) = self._filling("surrogate")
        loss_T, metrics = surrogate.surrogate(x, logr_T, adv_T, by_method[surrogate])
        for method in self._filling("weight"):
            loss_T = loss_T * method.weight(x, adv_T, by_method[method])
        for method in self._filling("correction"):
            loss_T = loss_T * method.correction(x)
        for method in self._filling("penalty"):
            penalty_T, more = method.penalty(x)
            loss_T, metrics = loss_T + penalty_T, {**metrics, **more}
        return loss_T, metrics


def _scored_only(x: TokenInputs) -> TokenInputs:
    """The inputs with 0 at masked tokens, and without gradient into what the loss holds constant.

    A non-finite value at a masked token would otherwise reach the gradient: zero times it is not zero.
    """

    def scored(value: Tensor | None) -> Tensor | None:
        return None if value is None else _scored(value, x.mask_T)

    def constant(value: Tensor | None) -> Tensor | None:
        return None if value is None else _scored(value.detach(), x.mask_T)

    return dataclasses.replace(
        x,
        logp_T=scored(x.logp_T),
        entropy_T=scored(x.entropy_T),
        topn_logp_TN=scored(x.topn_logp_TN),
        old_logp_T=constant(x.old_logp_T),
        ref_logp_T=constant(x.ref_logp_T),
        sampler_logp_T=constant(x.sampler_logp_T),
        old_entropy_T=constant(x.old_entropy_T),
        is_top1_T=constant(x.is_top1_T),
    )


def _scored(value: Tensor, mask_T: Tensor) -> Tensor:
    return value.masked_fill((mask_T == 0).view(-1, *[1] * (value.dim() - 1)), 0.0)


def _sequence(group: Group, index: int, advantage: float, scored: bool) -> TrainSequence:
    response = group.responses[index]
    completion = response.completion
    prompt = torch.tensor(group.prompt.tokens, dtype=torch.int64)
    return TrainSequence(
        group_id=group.id,
        index=index,
        tokens=torch.cat([prompt, completion.tokens]),
        prompt_length=len(group.prompt.tokens),
        reward=response.verdict.reward,
        correct=response.verdict.outcome is Outcome.CORRECT,
        advantage_T=torch.full((response.length,), advantage, dtype=torch.float32),
        mask_T=torch.full((response.length,), float(scored), dtype=torch.float32),
        sampler_logp_T=completion.sampler_logp,
        policy_logp_T=completion.policy_logp,
    )


def _mean(value_T: Tensor, weight_T: Tensor) -> Mean:
    masked_T = torch.where(weight_T > 0, value_T * weight_T, torch.zeros_like(weight_T))
    return Mean(float(masked_T.sum()), float(weight_T.sum()))


def build_recipe(
    names: Sequence[str],
    params: Mapping[str, MethodParams],
    *,
    reduction: Reduction | None,
    constant: float,
    mini_batches: int,
) -> Recipe:
    """Build and check a recipe. Raises UserError, naming the methods, for one that is unknown, unbuilt or illegal."""
    for name in names:
        if name in PLANNED:
            raise UserError(f"recipe.methods: {name!r} is not built yet; built are: {', '.join(METHODS)}")
        if name not in METHODS:
            raise UserError(f"recipe.methods: unknown method {name!r}; known are: {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise UserError(f"recipe.methods: a method is named twice in [{', '.join(names)}]")
    if not any("surrogate" in overridden_hooks(METHODS[name]) for name in names):
        names = [*names, DEFAULT_SURROGATE]
    _check_exclusive(names)
    methods = {name: METHODS[name](params.get(name, METHODS[name].Params())) for name in names}
    return Recipe(methods, _reduction(names, reduction), constant, mini_batches)


def _check_exclusive(names: Sequence[str]) -> None:
    for hook in EXCLUSIVE_HOOKS:
        filling = [name for name in names if hook in overridden_hooks(METHODS[name])]
        role = {"advantages": "estimator", "surrogate": "surrogate"}[hook]
        if len(filling) > 1:
            raise UserError(f"recipe.methods: {filling[0]!r} and {filling[1]!r} are both the {role}; keep one")
        if not filling:
            choices = [name for name in METHODS if hook in overridden_hooks(METHODS[name])]
            raise UserError(f"recipe.methods: no {role} in [{', '.join(names)}]; add one of: {', '.join(choices)}")


def _reduction(names: Sequence[str], chosen: Reduction | None) -> Reduction:
    if chosen is not None:
        return chosen
    prescribed = {name: METHODS[name].reduction for name in names if METHODS[name].reduction is not None}
    if len(set(prescribed.values())) > 1:
        first, second = list(prescribed)[:2]
        raise UserError(f"recipe.methods: {first!r}, {second!r} prescribe different reductions: set recipe.reduction")
    return next(iter(prescribed.values()), None) or Reduction.TOKEN_MEAN
