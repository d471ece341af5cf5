"""Makes a run's learners, in-process engine and rollouts from its configuration, and the settings of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megasharp.algos.base import Needs
from megasharp.batching.packing import PackLayout, row_multiple
from megasharp.common.records import Routing, SamplingParams, as_dtype
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.learner.learner import MEMORY, POLICY, LearnerSettings
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner
from megasharp.metrics.group_metrics import Diagnostics
from megasharp.planner.formulas import packing_flops
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.batch_collector import Rollouts
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.step_request import AsyncEngine, Engine, GroupMaker, SourceLimits
from megasharp.tasks.judge import Judge
from megasharp.trainer.placement import Placement
from megasharp.trainer.resolve.devices import device_of
from megasharp.trainer.resolve.resolved_run import ResolvedRun


def learner_settings(resolved: ResolvedRun) -> dict[str, LearnerSettings]:
    """Return the settings of the policy, and of the memory network where there is one, by their names on the ranks."""
    config = resolved.config
    policy = LearnerSettings(
        # Ranks may run in another folder.
        folder=str(resolved.model.path.absolute()),
        policy=config.policy,
        dtype=as_dtype(config.model.dtype),
        layout=resolved.layout,
        total_steps=config.steps * config.recipe.mini_batches,
        needs=resolved.recipes.needs,
        temperature=config.rollout.temperature,
        seed=config.seed,
        diagnostics=Diagnostics(config.log.candidates, config.data.largest_group),
        deterministic=config.deterministic,
    )
    if resolved.memory is None:
        return {POLICY: policy}
    params, own = resolved.memory.params, config.policy.optimizer
    schedule = {"lr": params.rate(own.lr), "warmup_steps": params.warmup_steps, "decay": params.decay}
    optimizer, experts = own.model_copy(update=schedule), config.policy.experts.model_copy(update={"replay": False})
    memory = dataclasses.replace(
        policy,
        folder=str(resolved.memory.model.path.absolute()),
        # It is small, and trained whole. Engines record where the policy sends tokens, not where it would.
        policy=config.policy.model_copy(update={"optimizer": optimizer, "lora": None, "experts": experts}),
        # Its own optimizer steps, however many the policy takes.
        total_steps=params.steps * max(0, config.steps - params.freeze_until),
        needs=Needs(),
        # Cross-entropy is that of the network as it is; only sampling divides by the rollouts' temperature.
        temperature=1.0,
        diagnostics=None,
        response_window=resolved.memory.window,
        cold=params.start == "cold",
    )
    return {POLICY: policy, MEMORY: memory}


def make_engine(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    memory_folder: Path | None = None,
    memory_window: int | None = None,
    records_experts: bool = False,
) -> InProcessEngine:
    """Make the in-process engine of a Hugging Face folder's architecture, with a memory network's beside it if given.

    It has no weights yet.
    """
    return InProcessEngine(
        folder,
        dtype=dtype,
        device=device,
        memory_folder=memory_folder,
        memory_window=memory_window,
        records_experts=records_experts,
    )


@dataclass(frozen=True, slots=True)
class Learners:
    """The policy, and the memory network where the recipe has one. Closing the policy ends both."""

    policy: RanksLearner
    memory: MemoryNetwork | None

    @property
    def all(self) -> Sequence[RanksLearner | MemoryNetwork]:
        """The policy, and the memory network where there is one."""
        return (self.policy,) if self.memory is None else (self.policy, self.memory)


def make_learners(resolved: ResolvedRun, placement: Placement, logs: Path) -> Learners:
    """Start all learners of a run, on ranks that they share."""
    ranks = placement.ranks(learner_settings(resolved), torch.device(device_of(resolved.config)), logs)
    memory = None
    if resolved.memory:
        layout = pack_layout(resolved, resolved.memory.architecture, resolved.memory.window)
        memory = MemoryNetwork(RanksLearner(ranks, MEMORY), layout, resolved.memory.params)
    return Learners(RanksLearner(ranks), memory)


def make_rollouts(resolved: ResolvedRun, engine: Engine, judge: Judge) -> Rollouts:
    """Make rollouts that sample and verify training groups round by round."""
    return Rollouts(engine, _group_maker(resolved, judge))


def make_async_rollouts(
    resolved: ResolvedRun, engine: AsyncEngine, judge: Judge, meanwhile: Callable[[], None]
) -> AsyncRollouts:
    """Make rollouts that verify groups as they become complete; `meanwhile` is called while engines sample."""
    return AsyncRollouts(engine, _group_maker(resolved, judge), resolved.config.rollout, meanwhile)


def _group_maker(resolved: ResolvedRun, judge: Judge) -> GroupMaker:
    config = resolved.config
    return GroupMaker(
        judge,
        resolved.tokenizer.decode_batch,
        sampling_params(config, resolved.tokenizer.stop_token_ids),
        responses_per_prompt=config.data.responses_per_prompt,
        seed=config.seed,
        limits={
            each.own_name: SourceLimits(each.max_response_tokens, each.responses_per_prompt) for each in config.data.mix
        },
        sizes=config.data.group_sizes,
        needs_experts=recorded_routing(resolved) is not None,
    )


def sampling_params(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return how training responses are drawn."""
    return SamplingParams(
        max_tokens=config.data.largest_response,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        stop_token_ids=stop_token_ids,
    )


def recorded_routing(resolved: ResolvedRun) -> Routing | None:
    """Return the sizes of the experts that engines record for the learner; None without routing replay."""
    return resolved.architecture.routing if resolved.config.policy.experts.replay else None


def pack_layout(
    resolved: ResolvedRun,
    architecture: Architecture,
    response_window: int | None = None,
    routing: Routing | None = None,
) -> PackLayout:
    """Return how a step is cut into micro-batches for a network of this architecture; `routing`: what it replays."""
    config = resolved.config
    return PackLayout(
        dp=resolved.layout.dp,
        micro_batch_tokens=config.policy.micro_batch_tokens,
        mini_batches=config.recipe.mini_batches,
        row_multiple=row_multiple(resolved.layout, torch.device(device_of(config)).type),
        constant=float(config.data.largest_response),
        micro_batch_multiple=resolved.layout.micro_batch_multiple,
        flops=packing_flops(architecture, config.policy.head == "chunked", response_window),
        silent_apart=_silent_apart(resolved),
        routing=routing,
    )


def _silent_apart(resolved: ResolvedRun) -> bool:
    """Return whether data-parallel ranks will pass groups without advantages forward alone, in every step.

    The filter changes advantages after packing, and a step is packed alike before and after it.
    """
    config, layout = resolved.config, resolved.layout
    return (
        layout.dp > 1
        and layout.pp == layout.ep == layout.etp == 1
        and config.policy.experts.balance_loss == 0.0
        and device_of(config) == "cpu"
        and config.guard.engine_gap_filter is None
        and not any(recipe.penalises for recipe in resolved.recipes.all)
    )
