"""A recipe: a list of methods, applied in the order of the hooks, and one reduction of their losses.

The pipeline around it (loop, packing, learner) is blind to methods; it calls `select`, `advantages`, `calibrate` and
`loss`. `megasharp.algos.build_recipe` makes one from names and refuses what cannot be combined. Losses per token become
one number once, with counts over the whole optimizer step: as no count is local, the result does not depend on packing,
micro-batch size or the number of ranks. A `RecipeSchedule` gives a run's first steps other recipes than the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce as fold
from typing import Any, Self

import torch
from torch import Tensor

from megasharp.algos.base import Method, Needs, OldLogp, Reduction, Stats, TokenMetric, TokenMetrics, overridden_hooks
from megasharp.algos.covariance import joined, micro_batches, with_advantages
from megasharp.algos.group_statistics import is_scored, rewards_of
from megasharp.common.records import (
    Completion,
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
from megasharp.common.records import Sequence as TrainSequence
from megasharp.ops.segment import means_on_host


def token_coefficients(
    reduction: Reduction, mask_T: Tensor, seq_T: Tensor, length_S: Tensor, denominators: Denominators
) -> Tensor:
    """Return the factor of each token's loss, so that the loss is `sum(loss_T * coefficient_T)`; [T], no gradient.

    `mask_T` [T] is 1 or 0, `seq_T` int64 [T] numbers the sequences, `length_S` [S] counts unmasked tokens per sequence
    of the micro-batch; a sequence without any gets no weight.
    With N tokens, S sequences, |y| tokens of a sequence and a constant horizon C in the whole step:
    token_mean 1/N; seq_mean_token_mean 1/(S |y|); seq_mean_token_sum 1/S; token_sum_over_constant 1/(S C).
    """
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    if reduction is Reduction.TOKEN_MEAN:
        return mask_T / tokens
    if reduction is Reduction.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = torch.clamp(length_S, min=1.0).to(mask_T.dtype)[seq_T]
        return mask_T / (per_sequence * sequences)
    if reduction is Reduction.SEQ_MEAN_TOKEN_SUM:
        return mask_T / sequences
    return mask_T / (sequences * denominators.constant)


MiniBatchStats = Sequence[Stats]


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
        """Inputs that passes of their own must compute before the update."""
        old = self.needs.old_logp
        in_loss_is_enough = old is OldLogp.IN_LOSS and self.mini_batches == 1
        return dataclasses.replace(self.needs, old_logp=OldLogp.NONE if in_loss_is_enough else old)

    @property
    def read_before_update(self) -> Needs:
        """Inputs that hooks before the update read: all that a method with one of these hooks needs."""
        methods = (*self._filling("calibrate"), *self._filling("prepare"))
        return fold(lambda a, b: a | b, (method.needs() for method in methods), Needs())

    @property
    def penalises(self) -> bool:
        """True where a method adds a loss that does not depend on advantages."""
        return bool(self._filling("penalty"))

    def at(self, step: int) -> Self:
        """Return this recipe in training step `step`, from 1, coefficients that change with the step settled."""
        methods = {name: method.at(step) for name, method in self.methods.items()}
        return type(self)(methods, self.reduction, self.constant, self.mini_batches)

    def _filling(self, hook: str) -> list[Method[Any]]:
        return [m for m in self.methods.values() if hook in overridden_hooks(type(m))]

    def _one_each(self, value_G: Tensor, group: Group, method: Method[Any], hook: str) -> Tensor:
        """Return what a hook returned. Raises ValueError unless that is one value for each response."""
        if value_G.shape != (len(group.responses),):
            name = next(name for name, one in self.methods.items() if one is method)
            raise ValueError(f"{name}.{hook} returned {value_G.numel()} values for {len(group.responses)} responses")
        return value_G

    def select(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups, those that a method drops with the reason of the first one that does."""
        reasons = [method.select(groups) for method in self._filling("select")]
        first = [next((r for r in by_method if r is not None), None) for by_method in zip(*reasons, strict=True)]
        return [
            dataclasses.replace(group, dropped_reason=reason)
            for group, reason in zip(groups, first or [None] * len(groups), strict=True)
        ]

    def advantages(self, groups: Sequence[Group]) -> list[TrainSequence]:
        """Return one training sequence for each response of every kept group, its advantage float64 on every token.

        Infra failures are masked, never scored.
        """
        return [sequence for group in groups if group.dropped_reason is None for sequence in self._sequences(group)]

    def _sequences(self, group: Group) -> list[TrainSequence]:
        scored = tuple(r for r in group.responses if is_scored(r))
        kept = dataclasses.replace(group, responses=scored)
        rewards_G = rewards_of(kept)
        for method in self._filling("rewards"):
            rewards_G = self._one_each(method.rewards(kept, rewards_G), kept, method, "rewards")
        advantages = iter(self._by_turn(kept, rewards_G) if scored else ())
        return [
            training_sequence(group, index, next(advantages) if is_scored(response) else None)
            for index, response in enumerate(group.responses)
        ]

    def _by_turn(self, group: Group, rewards_G: Tensor) -> list[Tensor]:
        """Return for each response its advantages [K] by turn, or [1] one for all of its turns."""
        (estimator,) = self._filling("advantages")
        if not self._filling("turn_advantages"):
            adv_G = self._one_each(estimator.advantages(rewards_G, group), group, estimator, "advantages")
            return [*adv_G.unsqueeze(1)]
        by_turn = estimator.turn_advantages(rewards_G, group)
        turns = [len(response.completion.policy_turns) for response in group.responses]
        if [adv_K.numel() for adv_K in by_turn] != turns:
            raise ValueError(f"{type(estimator).__name__}.turn_advantages must return a value for each turn: {turns}")
        return by_turn

    def calibrate(self, batch: StepBatch) -> tuple[StepBatch, Metrics]:
        """Apply every `calibrate` hook to the whole step, then compute the statistics of each optimizer step.

        Returns the step with its new advantages and statistics, and the hooks' metrics.
        """
        # Hooks see the whole step as one set of tokens, so that packing cannot change what they compute.
        methods = self._filling("calibrate")
        metrics: dict[str, Mean] = {}
        if methods:
            adv_T, x = joined(micro_batches(batch.mini_batches), self.read_before_update.draw)
            adv_T, x = adv_T.detach(), _scored_only(x)
            for method in methods:
                adv_T, more = method.calibrate(_scored(adv_T, x.mask_T), x)
                metrics |= _means(more)
            batch = with_advantages(batch, adv_T)
        if self._filling("prepare"):
            prepared = (dataclasses.replace(mini, statistics=self.prepare(mini)) for mini in batch.mini_batches)
            batch = dataclasses.replace(batch, mini_batches=tuple(prepared))
        return batch, metrics

    def prepare(self, mini: MiniBatch) -> tuple[Stats, ...]:
        """Return every method's statistics over one optimizer step, in the order of the methods."""
        adv_T, x = joined(micro_batches([mini]), self.read_before_update.draw)
        x = _scored_only(x)
        adv_T = _scored(adv_T, x.mask_T)
        filling = self._filling("prepare")
        return tuple(method.prepare(adv_T, x) if method in filling else {} for method in self.methods.values())

    def loss(
        self, micro: MicroBatch, x: TokenInputs, denominators: Denominators, stats: MiniBatchStats
    ) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the step's loss, a scalar with gradient, and its metrics.

        The shares of all micro-batches add up to the loss. `x` is `micro.inputs` with the learner's `logp_T`, and
        whatever else `needs` asks for; `stats` are the mini-batch's `statistics`.
        """
        x = _scored_only(x)
        adv_T = _scored(micro.advantage_T.detach().to(x.mask_T.dtype), x.mask_T)
        loss_T, metrics = self._token_loss(x, adv_T, stats)
        coefficient_T = token_coefficients(self.reduction, x.mask_T, x.seq_T, micro.length_S, denominators)
        return (loss_T * coefficient_T).sum(), _means(metrics)

    def _token_loss(self, x: TokenInputs, adv_T: Tensor, stats: MiniBatchStats) -> tuple[Tensor, TokenMetrics]:
        assert x.logp_T is not None
        by_method = dict(zip(self.methods.values(), stats or [{}] * len(self.methods), strict=True))
        directed_T, metrics = x.logp_T, dict[str, TokenMetric]()
        for method in self._filling("direction"):
            directed_T, more = method.direction(directed_T, x, adv_T)
            metrics |= more
        logr_T = directed_T - x.before_T
        for method in self._filling("log_ratio"):
            logr_T = method.log_ratio(logr_T, x, adv_T)
        (surrogate,) = self._filling("surrogate")
        loss_T, more = surrogate.surrogate(x, logr_T, adv_T, by_method[surrogate])
        metrics |= more
        for method in self._filling("weight"):
            weight_T, more = method.weight(x, adv_T, by_method[method])
            loss_T, metrics = loss_T * weight_T, metrics | dict(more)
        for method in self._filling("correction"):
            weight_T, more = method.correction(x)
            loss_T, metrics = loss_T * weight_T, metrics | dict(more)
        for method in self._filling("penalty"):
            penalty_T, more = method.penalty(x)
            loss_T, metrics = loss_T + penalty_T, metrics | dict(more)
        return loss_T, metrics


def _scored_only(x: TokenInputs) -> TokenInputs:
    """Return the inputs with 0 at masked tokens, and without gradient into what the loss holds constant.

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
        policy_logp_T=constant(x.policy_logp_T),
        old_entropy_T=constant(x.old_entropy_T),
        is_top1_T=constant(x.is_top1_T),
    )


def _scored(value: Tensor, mask_T: Tensor) -> Tensor:
    return value.masked_fill((mask_T == 0).view(-1, *[1] * (value.dim() - 1)), 0.0)


def training_sequence(group: Group, index: int, adv_K: Tensor | None) -> TrainSequence:
    """Return response `index` of a group with its advantages by turn, [K], or one for all its tokens, [1].

    None masks the whole response. Tokens of an environment are masked.
    """
    response = group.responses[index]
    completion = response.completion
    mask_T, sampled_T = torch.tensor(float(adv_K is not None)).expand(response.length), completion.sampled_T
    scored = [r for r in group.responses if is_scored(r)]
    prompt = torch.tensor(group.prompt.tokens, dtype=torch.int64)
    return TrainSequence(
        group_id=group.id,
        index=index,
        group_size=len(scored),
        group_correct=sum(r.verdict.outcome is Outcome.CORRECT for r in scored),
        seed=completion.seed,
        tokens=torch.cat([prompt, completion.tokens]),
        prompt_length=len(group.prompt.tokens),
        reward=response.verdict.reward,
        correct=response.verdict.outcome is Outcome.CORRECT,
        advantage_T=_spread(torch.zeros(1, dtype=torch.float64) if adv_K is None else adv_K, completion),
        mask_T=mask_T if sampled_T is None else mask_T * sampled_T,
        sampler_logp_T=completion.sampler_logp,
        policy_logp_T=completion.policy_logp,
        experts=_experts(completion, len(group.prompt.tokens)),
    )


def _experts(completion: Completion, prompt: int) -> Tensor | None:
    """Return the experts of the tokens that an engine has read, [read, layers, per_token], in the completion's memory.

    Raises ValueError where tokens were read without theirs.
    """
    found = completion.experts
    if found is None or not found.numel():
        return None
    unread, sampled = prompt + completion.length - found.shape[0], completion.policy_turns[-1][1]
    if not 1 <= unread <= 1 + completion.length - sampled:
        raise ValueError(
            f"{found.shape[0]} tokens have experts, of a prompt of {prompt} and {completion.length} others"
        )
    return found


def _spread(adv_K: Tensor, completion: Completion) -> Tensor:
    if adv_K.numel() == 1:
        # One value in memory, and packing sees without reading them that all are the same.
        return adv_K.expand(completion.length)
    adv_T = adv_K.new_zeros(completion.length)
    for (start, end), advantage in zip(completion.policy_turns, adv_K, strict=True):
        adv_T[start:end] = advantage
    return adv_T


def _means(metrics: TokenMetrics) -> dict[str, Mean]:
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for name, metric in metrics.items():
        weight_T = metric.weight_T
        # A value at a masked token may be infinite, and zero times that is not zero.
        masked_T = torch.where(weight_T > 0, metric.value_T * weight_T, torch.zeros_like(weight_T))
        sums[name] = masked_T.sum(), weight_T.sum()
    return means_on_host(sums)


class RecipeSchedule:
    """Recipes one after another; each of `stages` holds until its step, `final` from there on.

    Example: CaSP after 50 steps of GRPO is `RecipeSchedule([(50, grpo)], casp)`. `needs` is the union over all stages.
    `limited` has the same recipes under other response limits than the run's largest, by limit in tokens.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, Recipe]],
        final: Recipe,
        limited: Mapping[int, RecipeSchedule] | None = None,
    ) -> None:
        assert [until for until, _ in stages] == sorted({until for until, _ in stages})
        self._stages = tuple(stages)
        self.final = final
        self._limited = dict(limited or {})
        self.needs: Needs = fold(lambda a, b: a | b, (recipe.needs for _, recipe in stages), final.needs)

    @property
    def all(self) -> tuple[Recipe, ...]:
        """Every stage's recipe under every response limit, the final one under the largest limit last."""
        limited = (recipe for schedule in self._limited.values() for recipe in schedule.all)
        return (*limited, *(recipe for _, recipe in self._stages), self.final)

    def at(self, step: int, response_limit: int | None = None) -> Recipe:
        """Return the recipe of training step `step` (from 1), coefficients that change with the step settled.

        `response_limit` is the step's limit on responses in tokens; None is the run's largest one.
        """
        if response_limit in self._limited:
            return self._limited[response_limit].at(step)
        recipe = next((recipe for until, recipe in self._stages if step <= until), self.final)
        return recipe.at(step)
