"""Learner, engine, rollouts and sync of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megasharp.batching.layout import PackLayout, row_multiple
from megasharp.build.check import Checked
from megasharp.build.devices import device_of
from megasharp.build.learners import learner_settings
from megasharp.build.placement import Placement
from megasharp.config.run import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.mcore.rank import MEMORY
from megasharp.plan.formulas import packing_flops
from megasharp.protocols import AsyncEngine, Engine
from megasharp.ranks.learner import RanksLearner
from megasharp.ranks.memory import MemoryNetwork
from megasharp.rewards.judge import Judge
from megasharp.rollout.asynchronous import AsyncRollouts
from megasharp.rollout.collect import Rollouts
from megasharp.rollout.groups import GroupMaker
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.order import CollectionSettings
from megasharp.types import SamplingParams


def make_engine(
    folder: Path, dtype: torch.dtype, device: torch.device, memory_folder: Path | None = None
) -> InProcessEngine:
    """The in-process engine for a Hugging Face folder's architecture, or a policy's and a memory's; no weights yet."""
    return InProcessEngine(folder, dtype=dtype, device=device, memory_folder=memory_folder)


@dataclass(frozen=True, slots=True)
class Learners:
    """The policy, and the memory network where the recipe has one. Closing the policy ends both."""

    policy: RanksLearner
    memory: MemoryNetwork | None

    @property
    def all(self) -> Sequence[RanksLearner | MemoryNetwork]:
        """The policy, and the memory network where there is one."""
        return (self.policy,) if self.memory is None else (self.policy, self.memory)


def make_learners(checked: Checked, placement: Placement, logs: Path) -> Learners:
    """All learners of a run, on ranks that they share."""
    ranks = placement.ranks(learner_settings(checked), torch.device(device_of(checked.config)), logs)
    memory = None
    if checked.memory:
        memory = MemoryNetwork(RanksLearner(ranks, MEMORY), pack_layout(checked, checked.memory.architecture))
    return Learners(RanksLearner(ranks), memory)


def make_rollouts(checked: Checked, engine: Engine, judge: Judge) -> Rollouts:
    """Sampling and verification of training groups, round by round."""
    return Rollouts(engine, _group_maker(checked, judge))


def make_async_rollouts(
    checked: Checked, engine: AsyncEngine, judge: Judge, meanwhile: Callable[[], None]
) -> AsyncRollouts:
    """The same as they become complete; `meanwhile` is called now and then while engines are waited for."""
    rollout = checked.config.rollout
    settings = CollectionSettings(rollout.oversample, rollout.max_staleness, rollout.stragglers)
    return AsyncRollouts(engine, _group_maker(checked, judge), settings, meanwhile)


def _group_maker(checked: Checked, judge: Judge) -> GroupMaker:
    config = checked.config
    return GroupMaker(
        judge,
        checked.tokenizer.decode_batch,
        sampling_params(config, checked.tokenizer.stop_token_ids),
        responses_per_prompt=config.data.responses_per_prompt,
        seed=config.seed,
    )


def sampling_params(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How training responses are drawn."""
    return SamplingParams(
        max_tokens=config.data.largest_response,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        stop_token_ids=stop_token_ids,
    )


def pack_layout(checked: Checked, architecture: Architecture) -> PackLayout:
    """How a step is cut into micro-batches for a network of this architecture."""
    config = checked.config
    return PackLayout(
        dp=checked.layout.dp,
        micro_batch_tokens=config.policy.micro_batch_tokens,
        mini_batches=config.recipe.mini_batches,
        row_multiple=row_multiple(checked.layout, torch.device(device_of(config)).type),
        constant=float(config.data.largest_response),
        micro_batch_multiple=checked.layout.micro_batch_multiple,
        flops=packing_flops(architecture, config.policy.head == "chunked"),
    )
