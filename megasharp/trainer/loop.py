"""The training program: one page of verbs, without the back-end that carries one out, and without any method's name.

    groups  = rollouts.collect(prompts, request) rollout     prompts -> sampled responses; tasks' verifiers give rewards
              recipe.select(groups)          algos           within it: dropped groups are replaced, where asked
    samples = recipe.advantages(groups)      algos           rewards -> list[Sequence]
    batch   = pack(samples, layout)          batching        samples -> micro-batches + GLOBAL denominators
    batch   = learner.annotate(batch, needs) learner         old / reference log-probs and entropies, only where needed
    batch   = guards.filter(batch)           trainer/guards  without responses that another policy sampled, where asked
    batch   = recipe.calibrate(batch)        algos           advantages that depend on them
    stats   = learner.step(batch, recipe)    learner, algos  the policy's weights move: an optimizer step a mini-batch
    memory.observe(groups)                   learner/ranks   DLC: the memory network learns what was sampled
    version = sync.push(learner, memory)     weight_sync     the engines' weights move: HF-named tensors, version + 1
    at their intervals: checkpoint, evaluate checkpoint, evals; also saved: the best weights, and where a run stops

Staleness: a step's groups are sampled by the weights that the step before it pushed, unless the rollouts may run ahead
of the weights. `rollout.max_staleness` bounds by how many versions the collectors let them; at 0 every response of a
step is sampled by the newest weights. A run's first push comes before its first step (`trainer/run.py`).

The loop sees neither a network's layers nor how a response comes about. Layers are `learner/` (with the names of their
tensors in `convert/`). A response is made in `rollout/`, from requests to verified groups, and judged by its task in
`tasks/`; where that is an environment, `rollout/episodes` lets it answer each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megasharp.algos.base import Needs
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout, pack, packing_metrics
from megasharp.common.control import LengthStage, Reset
from megasharp.common.errors import TrainingStopped
from megasharp.common.records import Group, Mean, Metrics, StepBatch, StepStats
from megasharp.config.run_config import RunConfig
from megasharp.metrics.clock import StageClock
from megasharp.metrics.group_metrics import advantage_metrics, flatten, group_metrics
from megasharp.rollout.step_request import Collected, PromptSource, StepRequest
from megasharp.rollout.tally import places_in
from megasharp.trainer.annotation_ahead import AnnotationAhead
from megasharp.trainer.guards import Guards
from megasharp.trainer.source_metrics import source_metrics
from megasharp.weight_sync.endpoints import WeightSource


class Learner(WeightSource, Protocol):
    """The policy under training, whatever its parallelism."""

    def annotate(self, batch: StepBatch, needs: Needs, returned: Needs | None = None) -> StepBatch:
        """Find old / reference log-probs and old entropies of the batch's tokens, where `needs` asks for them.

        The step has them all; the batch that is returned has those that `returned` asks for, or all where it is None.
        """
        ...

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats:
        """Take one optimizer step per mini-batch of `batch`; one whose gradient norm is above the limit is left out."""
        ...

    def forget(self) -> None:
        """Let go of what `annotate` kept, where no step comes."""
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


class Prompts(PromptSource, Protocol):
    """The prompts of training, of one source or of a mixture."""

    def weigh(self, weights: Mapping[str, float] | None) -> None:
        """Mix sources by these weights from now on; None stands for the mixture's own."""
        ...


class Rollouts(Protocol):
    """Samples responses, has their tasks verify them, and selects groups.

    While it waits for engines it lets `signals.SaveAsked` through, losing nothing.
    """

    def collect(self, prompts: PromptSource, request: StepRequest) -> Collected:
        """Return a step's verified groups; engines may have begun them under earlier weights."""
        ...


class Recipes(Protocol):
    """The recipe of each step: how rewards become a loss."""

    @property
    def needs(self) -> Needs: ...

    def at(self, step: int, response_limit: int | None = None) -> Recipe: ...


class Control(Protocol):
    """Decides in a run's course: its stages, resets, which gradients are too large, and its end."""

    def stage(self, step: int) -> LengthStage: ...

    def reset(self, step: int) -> Reset | None: ...

    def carried_out(self, reset: Reset) -> None: ...

    def norm_limit(self) -> float | None: ...

    def updated(self, norms: Sequence[float]) -> None: ...

    def over(self) -> bool: ...


class MemoryLearner(WeightSource, Protocol):
    """The memory network of DLC under training: it learns to predict what the policy says."""

    def observe(self, groups: Sequence[Group], step: int, seed: int) -> Metrics:
        """Learn the responses of a step's groups by cross-entropy."""
        ...


class Sync(Protocol):
    """Moves weights from learners to engines."""

    @property
    def version(self) -> int:
        """The policy's version that engines sample with."""
        ...

    def push(self, source: WeightSource, memory: WeightSource | None = None) -> int:
        """Load the learners' present weights into every engine; returns their version, one above the last."""
        ...


class Phases(Protocol):
    """Hands the devices that learner and engines may share to one of them; called before it needs them."""

    def sampling(self) -> None:
        """Give engines the devices: weights and cache."""
        ...

    def training(self) -> None:
        """Give the learner the devices; engines sleep."""
        ...

    def handover(self) -> None:
        """Give both what a push needs: the learner's weights, and room for them in the engines."""
        ...


@dataclass(frozen=True, slots=True)
class Components:
    """The parts that the loop's verbs act on; `memory` is None without DLC.

    The last four act around a step. `check_replicas(step, updated)`, before and after the update, raises RunFailed
    where ranks hold different copies of what should be one. `after_step(step, groups, metrics)` records the step.
    `checkpoint(step, skipped)` saves all that a resumed run needs: the learners' weights and optimizers, the reference
    once a reset has moved it, random generators, the place among the prompts with responses that no step has trained
    on, and what `control` decided. `evaluate(step)` returns whether the weights are the best so far and must be saved.
    """

    prompts: Prompts
    rollouts: Rollouts
    recipes: Recipes
    control: Control
    layout: PackLayout
    learner: Learner
    memory: MemoryLearner | None
    sync: Sync
    phases: Phases
    clock: StageClock
    guards: Guards
    check_replicas: Callable[[int, bool], None]
    after_step: Callable[[int, Sequence[Group], Mapping[str, float]], None]
    checkpoint: Callable[[int, int], None]
    evaluate: Callable[[int], bool]


@dataclass(slots=True)
class LoopState:
    """Progress of the loop: the last finished step, how many steps in a row were not applied, the last step saved."""

    step: int = 0
    skipped_in_a_row: int = 0
    last_saved: int | None = None


def run(parts: Components, config: RunConfig, state: LoopState) -> None:
    """Train from `state` to step `config.steps`, or to the step after which `control` ends the run.

    Step s packs by seed `seed` + s. `checkpoint.every` is at least 1; with `eval.every` 0 the loop evaluates nothing.
    Raises TrainingStopped where `guards` have a reason to stop. `signals.SaveAsked` passes through, with
    `state` at the last step that is done.
    """
    while state.step < config.steps and not parts.control.over():
        step = state.step + 1
        groups, values, stats = train_step(parts, config, step)
        state.step = step
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if stats.skipped else 0
        parts.check_replicas(step, True)
        parts.after_step(step, groups, values)
        last = step == config.steps or parts.control.over()
        if last or step % config.checkpoint.every == 0:
            _save(parts, state)
        reason = parts.guards.after_step(state.skipped_in_a_row, values, groups)
        if reason is not None:
            if state.last_saved != step:
                parts.checkpoint(step, state.skipped_in_a_row)
            raise TrainingStopped(f"{reason.cause}; stopped at step {step} with a checkpoint; {reason.remedy}")
        # The run evaluates its last step itself, when the loop has ended.
        if config.eval.every and step % config.eval.every == 0 and not last:
            best = parts.evaluate(step)
            if best and state.last_saved != step:
                # Evaluating gave the engines the devices, and a save reads the learner's.
                parts.phases.handover()
                _save(parts, state)


def _save(parts: Components, state: LoopState) -> None:
    parts.checkpoint(state.step, state.skipped_in_a_row)
    state.last_saved = state.step


def train_step(parts: Components, config: RunConfig, step: int) -> tuple[list[Group], dict[str, float], StepStats]:
    """Train one step; returns its groups, its metrics and the learner's report."""
    clock, stage = parts.clock, parts.control.stage(step)
    recipe = parts.recipes.at(step, stage.max_response_tokens)
    parts.prompts.weigh(stage.weights)
    with clock.stage("phases"):
        parts.phases.sampling()
    annotation = _annotation(parts, config, recipe, step)
    collected = _collect(parts, config, recipe, step, stage, annotation)
    with clock.stage("phases"):
        parts.phases.training()
    parts.check_replicas(step, False)
    # Before the update, so that its penalty is already to the new reference.
    reset = _reset(parts, step)
    groups = collected.groups
    stats, update, trained = _update(parts, recipe, groups, config.seed + step, annotation)
    collected.tally.grouped(groups, trained)
    memory: Metrics = {}
    if parts.memory is not None:
        with clock.stage("memory"):
            memory = parts.memory.observe(groups, step, config.seed + step)
    # On shared devices a push needs the learner's weights and room for them in the engines, at the same time.
    with clock.stage("phases"):
        parts.phases.handover()
    # From here on engines sample with the new weights; what they still sample from before is one version staler.
    with clock.stage("sync"):
        parts.sync.push(parts.learner, parts.memory)
    values = group_metrics(groups) | dict(collected.metrics) | collected.tally.metrics()
    values |= source_metrics(groups, [source.own_name for source in config.data.mix])
    values |= flatten(update) | flatten(memory)
    done = {
        "policy/skipped": stats.skipped,
        "policy/spikes": stats.spikes,
        "policy/reset": reset,
        "rollout/length_limit": stage.max_response_tokens,
    }
    return groups, values | {name: float(value) for name, value in done.items()}, stats


def _annotation(parts: Components, config: RunConfig, recipe: Recipe, step: int) -> AnnotationAhead | None:
    """Return the annotation that goes on while engines sample; None where it must wait until they have."""
    reset = parts.control.reset(step)
    if not config.rollout.overlap_annotation or (reset is not None and "reference" in reset.what):
        # A reset replaces the reference after the rollouts and before the update.
        return None
    needs, read = parts.guards.needs(recipe.annotation), parts.guards.needs(recipe.read_before_update)
    return AnnotationAhead(parts.learner.annotate, needs, read, parts.layout, config.seed + step)


def _collect(
    parts: Components,
    config: RunConfig,
    recipe: Recipe,
    step: int,
    stage: LengthStage,
    annotation: AnnotationAhead | None,
) -> Collected:
    """Collect a step's groups, sampled as its recipe and its stage ask."""
    needs = recipe.needs
    request = StepRequest(
        step,
        config.data.prompts_per_step,
        recipe.select,
        needs.refill_rounds,
        needs.memory,
        last=step == config.steps,
        max_tokens=stage.max_response_tokens,
        responses=stage.responses_per_prompt,
        meanwhile=annotation,
    )
    with parts.clock.uncounted("rollout"):
        collected = parts.rollouts.collect(parts.prompts, request)
    for name, seconds in collected.seconds.items():
        parts.clock.add(name, seconds)
    asked = {} if request.memory is None else {"memory/mu": request.memory.mu}
    return replace(collected, metrics={**collected.metrics, **asked})


def _update(
    parts: Components, recipe: Recipe, groups: Sequence[Group], seed: int, annotation: AnnotationAhead | None
) -> tuple[StepStats, Metrics, set[int]]:
    """Update the policy; returns the report, metrics, and the places of the responses that it read.

    A step of which nothing is left counts as skipped. `annotation` has what was annotated while engines sampled.
    """
    nothing = StepStats(loss=0.0, grad_norm=0.0, learning_rate=0.0, skipped=1)
    with parts.clock.stage("prepare"):
        samples = recipe.advantages(groups)
        ahead = annotation.metrics(samples) if annotation is not None else {}
        if not samples:
            parts.learner.forget()
            return nothing, ahead, set()
        packed = pack(samples, parts.layout, seed)
    with parts.clock.stage("annotate"):
        if annotation is not None:
            annotated = annotation.complete(packed, samples)
        else:
            needs, read = parts.guards.needs(recipe.annotation), parts.guards.needs(recipe.read_before_update)
            annotated = parts.learner.annotate(packed, needs, read)
        batch, gaps = parts.guards.filter(annotated, recipe, groups, parts.layout)
        if batch is None:
            parts.learner.forget()
            return nothing, {**gaps, **ahead}, set()
        batch, calibrated = recipe.calibrate(batch)
    with parts.clock.stage("update"):
        stats = parts.learner.step(batch, recipe, parts.control.norm_limit())
        parts.control.updated(stats.norms)
    report = {"loss": stats.loss, "grad_norm": stats.grad_norm, "learning_rate": stats.learning_rate}
    metrics = {
        **packing_metrics(batch, parts.layout.flops),
        **advantage_metrics(batch),
        **calibrated,
        **stats.metrics,
        **gaps,
        **ahead,
        **{f"policy/{name}": Mean(value, 1.0) for name, value in report.items()},
        **{f"update/{name}_seconds": Mean(seconds, 1.0) for name, seconds in stats.seconds.items()},
    }
    return stats, metrics, places_in(batch)


def _reset(parts: Components, step: int) -> bool:
    """Make the weights the reference, or restart the optimizer, where that is due; returns whether anything was."""
    reset = parts.control.reset(step)
    if reset is None:
        return False
    if "reference" in reset.what:
        parts.learner.set_reference()
    if "optimizer" in reset.what:
        parts.learner.reset_optimizer()
    parts.control.carried_out(reset)
    return True
