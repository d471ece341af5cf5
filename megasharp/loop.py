"""The program: one page of verbs. Which back-end carries a verb out, and which methods train, is not known here.

    prompts = stream.take(n)                 data        cursor            -> list[Prompt]
    groups  = rollouts.collect(prompts)      rollout     Prompt            -> list[Group]   (reward, selection inside)
    samples = recipe.advantages(groups)      algos       rewards           -> list[Sequence]
    batch   = pack(samples, layout)          batching    samples           -> micro-batches + GLOBAL denominators
    batch   = learner.annotate(batch, needs) mcore       old / reference log-probs and entropies, only where needed
    batch   = recipe.calibrate(batch)        algos       advantages that depend on them
    stats   = learner.step(batch, recipe)    mcore+algos one optimizer step, or several mini-batches
    version = sync.push(learner)             sync        HF-named weights  -> engines; version + 1
    if due(step): checkpoint / evaluate      checkpoint, evals

Everything is strictly on-policy: a step's groups are sampled by the weights that the step before it pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megasharp.algos.recipe import Recipe
from megasharp.batching.pack import PackLayout, pack
from megasharp.errors import TrainingStopped
from megasharp.metrics.clock import StageClock
from megasharp.metrics.flatten import flatten
from megasharp.metrics.groups import group_metrics
from megasharp.protocols import Learner, WeightSource
from megasharp.types import Group, Prompt, StepStats


class Stream(Protocol):
    """Endless prompts."""

    def take(self, count: int) -> list[Prompt]: ...


class Rollouts(Protocol):
    """Samples, verifies and selects."""

    def collect(self, prompts: Sequence[Prompt], step: int) -> list[Group]: ...


class Sync(Protocol):
    """Weights to engines."""

    @property
    def version(self) -> int: ...

    def push(self, source: WeightSource) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of the loop. Zero `evaluate_every` means only at the ends."""

    steps: int
    prompts_per_step: int
    checkpoint_every: int
    evaluate_every: int
    nan_limit: int
    seed: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What the verbs act on. The last three are told what happened: after a step, to save, and to evaluate."""

    stream: Stream
    rollouts: Rollouts
    recipe: Recipe
    layout: PackLayout
    learner: Learner
    sync: Sync
    clock: StageClock
    after_step: Callable[[int, Sequence[Group], Mapping[str, float]], None]
    checkpoint: Callable[[int, int], None]
    evaluate: Callable[[int], None]


@dataclass(slots=True)
class Standing:
    """Where the run stands: the last finished step, and how many steps in a row were not applied."""

    step: int = 0
    skipped_in_a_row: int = 0
    last_saved: int | None = field(default=None)


def run(parts: Parts, plan: Plan, standing: Standing) -> None:
    """Train from where the run stands to `plan.steps`. Raises TrainingStopped after too many non-finite steps."""
    while standing.step < plan.steps:
        step = standing.step + 1
        groups, values, stats = train_step(parts, plan, step)
        standing.step = step
        standing.skipped_in_a_row = standing.skipped_in_a_row + 1 if stats.skipped else 0
        parts.after_step(step, groups, values)
        if _due(step, plan.checkpoint_every, plan.steps):
            parts.checkpoint(step, standing.skipped_in_a_row)
            standing.last_saved = step
        _guard(parts, plan, standing)
        if plan.evaluate_every and step % plan.evaluate_every == 0 and step < plan.steps:
            parts.evaluate(step)


def train_step(parts: Parts, plan: Plan, step: int) -> tuple[list[Group], dict[str, float], StepStats]:
    """One step: returns its groups, its figures and the learner's report."""
    clock = parts.clock
    groups = parts.rollouts.collect(parts.stream.take(plan.prompts_per_step), step)
    with clock.stage("prepare"):
        samples = parts.recipe.advantages(groups)
        batch = pack(samples, parts.layout, plan.seed + step)
    with clock.stage("annotate"):
        batch = parts.learner.annotate(batch, parts.recipe.annotation)
        batch = parts.recipe.calibrate(batch)
    with clock.stage("update"):
        stats = parts.learner.step(batch, parts.recipe)
    with clock.stage("sync"):
        parts.sync.push(parts.learner)
    values = group_metrics(groups) | flatten(stats.metrics) | _learner_values(stats)
    return groups, values, stats


def _learner_values(stats: StepStats) -> dict[str, float]:
    return {
        "policy/loss": stats.loss,
        "policy/grad_norm": stats.grad_norm,
        "policy/learning_rate": stats.learning_rate,
        "policy/skipped": float(stats.skipped),
    }


def _due(step: int, every: int, last: int) -> bool:
    return step == last or step % every == 0


def _guard(parts: Parts, plan: Plan, standing: Standing) -> None:
    if standing.skipped_in_a_row < plan.nan_limit:
        return
    if standing.last_saved != standing.step:
        parts.checkpoint(standing.step, standing.skipped_in_a_row)
    raise TrainingStopped(
        f"{standing.skipped_in_a_row} steps in a row had a non-finite loss or gradient; stopped at step "
        f"{standing.step} with a checkpoint; lower policy.optimizer.lr or look at metrics.jsonl"
    )
