"""The program: one page of verbs. Which back-end carries a verb out, and which methods train, is not known here.

    groups  = rollouts.collect(stream, order) rollout    prompts           -> list[Group]   (verified)
              recipe.select(groups)          algos       within it: dropped ones are replaced, where asked
    samples = recipe.advantages(groups)      algos       rewards           -> list[Sequence]
    batch   = pack(samples, layout)          batching    samples           -> micro-batches + GLOBAL denominators
    batch   = learner.annotate(batch, needs) mcore       old / reference log-probs and entropies, only where needed
    batch   = recipe.calibrate(batch)        algos       advantages that depend on them
    stats   = learner.step(batch, recipe)    mcore+algos one optimizer step, or several mini-batches
    memory.observe(groups)                   ranks       DLC: one cross-entropy step of the memory network
    version = sync.push(learner, memory)     sync        HF-named weights  -> engines; version + 1
    if due(step): checkpoint / evaluate      checkpoint, evals

A step's groups are sampled by the weights that the step before it pushed, unless the rollouts may run ahead: how far is
bounded, and `max_staleness: 0` is strictly on-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megasharp.algos.base import Needs
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout, pack, packing_metrics
from megasharp.common.control import Reset
from megasharp.common.errors import TrainingStopped
from megasharp.common.records import Group, Mean, Metrics, StepBatch, StepStats
from megasharp.metrics.clock import StageClock
from megasharp.metrics.group_metrics import advantage_metrics, flatten, group_metrics
from megasharp.rollout.step_request import Collected, PromptSource, StepRequest
from megasharp.weight_sync.endpoints import WeightSource


class Learner(WeightSource, Protocol):
    """The policy under training, whatever its parallelism."""

    def annotate(self, batch: StepBatch, needs: Needs) -> StepBatch:
        """Fill in old / reference log-probs and old entropies, where `needs` asks for them."""
        ...

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        """One optimizer step per mini-batch of `batch`; one whose gradient norm is above the limit is left out."""
        ...

    def set_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy."""
        ...

    def reset_optimizer(self) -> None:
        """Forget moments and step count; weights stay."""
        ...

    def offload(self) -> None:
        """Free the accelerator's weights, gradients and optimizer state (kept on the host)."""
        ...

    def onload(self) -> None:
        """Undo `offload`, bit for bit."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class Rollouts(Protocol):
    """Samples, verifies and selects. While it waits for engines it lets `signals.SaveAsked` through, losing nothing."""

    def collect(self, source: PromptSource, order: StepRequest) -> Collected: ...


class Recipes(Protocol):
    """Which recipe trains at which step."""

    @property
    def needs(self) -> Needs: ...

    def at(self, step: int, response_limit: int | None = None) -> Recipe: ...


class Control(Protocol):
    """What changes in a run's course: how long responses may be, resets, which gradients are too large, and its end."""

    def response_limit(self, step: int) -> int: ...

    def reset(self, step: int) -> Reset | None: ...

    def carried_out(self, reset: Reset) -> None: ...

    def norm_limit(self) -> float | None: ...

    def updated(self, norms: Sequence[float]) -> None: ...

    def over(self) -> bool: ...


class Memory(WeightSource, Protocol):
    """A memory network that learns what the policy says."""

    def observe(self, groups: Sequence[Group], seed: int) -> Metrics: ...


class Sync(Protocol):
    """Weights to engines."""

    @property
    def version(self) -> int: ...

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int: ...


class Phases(Protocol):
    """Who has the devices that learner and engines may share: called before either is needed."""

    def sampling(self) -> None: ...

    def training(self) -> None: ...

    def handover(self) -> None: ...


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
class Components:
    """What the verbs act on; `memory` is None without DLC.

    The last three are told what happened: after a step, to save, and to evaluate, which says whether the weights are
    the best so far and must be saved.
    """

    stream: PromptSource
    rollouts: Rollouts
    recipes: Recipes
    control: Control
    layout: PackLayout
    learner: Learner
    memory: Memory | None
    sync: Sync
    phases: Phases
    clock: StageClock
    after_step: Callable[[int, Sequence[Group], Mapping[str, float]], None]
    checkpoint: Callable[[int, int], None]
    evaluate: Callable[[int], bool]


@dataclass(slots=True)
class LoopState:
    """Where the run stands: the last finished step, and how many steps in a row were not applied."""

    step: int = 0
    skipped_in_a_row: int = 0
    last_saved: int | None = field(default=None)


def run(parts: Components, plan: Plan, standing: LoopState) -> None:
    """Train from where the run stands to `plan.steps`, or to the step after which it is over.

    Raises TrainingStopped after too many non-finite steps, and lets `signals.SaveAsked` through, with `standing` at the
    last step that is done.
    """
    while standing.step < plan.steps and not parts.control.over():
        step = standing.step + 1
        groups, values, stats = train_step(parts, plan, step)
        standing.step = step
        standing.skipped_in_a_row = standing.skipped_in_a_row + 1 if stats.skipped else 0
        parts.after_step(step, groups, values)
        last = step == plan.steps or parts.control.over()
        if last or step % plan.checkpoint_every == 0:
            parts.checkpoint(step, standing.skipped_in_a_row)
            standing.last_saved = step
        _guard(parts, plan, standing)
        if plan.evaluate_every and step % plan.evaluate_every == 0 and not last:
            _evaluate(parts, standing)


def _evaluate(parts: Components, standing: LoopState) -> None:
    best = parts.evaluate(standing.step)
    if best and standing.last_saved != standing.step:
        parts.phases.handover()
        parts.checkpoint(standing.step, standing.skipped_in_a_row)
        standing.last_saved = standing.step


def train_step(parts: Components, plan: Plan, step: int) -> tuple[list[Group], dict[str, float], StepStats]:
    """One step: returns its groups, its figures and the learner's report."""
    clock, limit = parts.clock, parts.control.response_limit(step)
    recipe = parts.recipes.at(step, limit)
    with clock.stage("phases"):
        parts.phases.sampling()
    collected = _collect(parts, plan, recipe, step, limit)
    with clock.stage("phases"):
        parts.phases.training()
    reset = _reset(parts, step)
    groups = collected.groups
    stats, update = _update(parts, recipe, groups, plan.seed + step)
    memory: Metrics = {}
    if parts.memory is not None:
        with clock.stage("memory"):
            memory = parts.memory.observe(groups, plan.seed + step)
    with clock.stage("phases"):
        parts.phases.handover()
    with clock.stage("sync"):
        parts.sync.push(parts.learner, parts.memory)
    values = group_metrics(groups) | dict(collected.figures) | flatten(update) | flatten(memory)
    done = {
        "policy/skipped": stats.skipped,
        "policy/spikes": stats.spikes,
        "policy/reset": reset,
        "rollout/length_limit": limit,
    }
    return groups, values | {name: float(value) for name, value in done.items()}, stats


def _collect(parts: Components, plan: Plan, recipe: Recipe, step: int, limit: int) -> Collected:
    """A step's groups, sampled as its recipe asks."""
    needs = recipe.needs
    last = step == plan.steps
    order = StepRequest(step, plan.prompts_per_step, recipe.select, needs.refill_rounds, needs.memory, last, limit)
    with parts.clock.uncounted("rollout"):
        collected = parts.rollouts.collect(parts.stream, order)
    for stage, seconds in collected.seconds.items():
        parts.clock.add(stage, seconds)
    asked = {} if order.memory is None else {"memory/mu": order.memory.mu}
    return replace(collected, figures={**collected.figures, **asked})


def _update(parts: Components, recipe: Recipe, groups: Sequence[Group], seed: int) -> tuple[StepStats, Metrics]:
    """The policy's update and its figures; where every group was dropped there are none, and it counts as skipped."""
    with parts.clock.stage("prepare"):
        samples = recipe.advantages(groups)
        if not samples:
            return StepStats(loss=0.0, grad_norm=0.0, learning_rate=0.0, skipped=1), {}
        batch = pack(samples, parts.layout, seed)
    with parts.clock.stage("annotate"):
        batch = parts.learner.annotate(batch, recipe.annotation)
        batch, calibrated = recipe.calibrate(batch)
    with parts.clock.stage("update"):
        stats = parts.learner.step(batch, recipe, parts.control.norm_limit())
        parts.control.updated(stats.norms)
    figures = {**packing_metrics(batch, parts.layout.flops), **advantage_metrics(batch), **calibrated}
    return stats, {**figures, **stats.metrics, **_learner_metrics(stats)}


def _reset(parts: Components, step: int) -> bool:
    """Reset what is due before the update of `step`; returns whether anything was."""
    reset = parts.control.reset(step)
    if reset is None:
        return False
    if "reference" in reset.what:
        parts.learner.set_reference()
    if "optimizer" in reset.what:
        parts.learner.reset_optimizer()
    parts.control.carried_out(reset)
    return True


def _learner_metrics(stats: StepStats) -> Metrics:
    values = {"loss": stats.loss, "grad_norm": stats.grad_norm, "learning_rate": stats.learning_rate}
    parts = {f"update/{name}_seconds": Mean(seconds, 1.0) for name, seconds in stats.seconds.items()}
    return {f"policy/{name}": Mean(value, 1.0) for name, value in values.items()} | parts


def _guard(parts: Components, plan: Plan, standing: LoopState) -> None:
    if standing.skipped_in_a_row < plan.nan_limit:
        return
    if standing.last_saved != standing.step:
        parts.checkpoint(standing.step, standing.skipped_in_a_row)
    raise TrainingStopped(
        f"{standing.skipped_in_a_row} steps in a row were not applied (a loss or gradient that is not finite or, by "
        "guard.spike_sigma, too large, or every group dropped by selection); stopped at step "
        f"{standing.step} with a checkpoint; look at policy/grad_norm, policy/spikes and group/dropped in "
        "metrics.jsonl, then lower policy.optimizer.lr or ease the selection"
    )
