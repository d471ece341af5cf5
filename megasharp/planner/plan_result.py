"""The planner's answer. Sizes are bytes on one GPU (or one rank of a CPU run) unless said otherwise, times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StageKind = Literal["first", "middle", "last", "only"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage's rank. `kind`: first, middle, last, or only where there is one stage.

    `trained`: the policy's parameters that have gradients: all of them, or its adapters. `activations_by`: what they
    would be under each setting of recompute. `memory_network` is all that the memory network keeps (weights, gradients,
    optimizer); `memory_step` what its own micro-batch adds. `reserved` is assumed for CUDA, NCCL and fragmentation.
    `totals`: by phase. `must_offload`: the least that has to leave the GPU while co-located engines sample; None where
    all of it is too little. `optimizer_on_host`: of policy and memory network, where it is not on the GPU, which a step
    then needs `staging` for. `reference_on_host`: the reference's, beside a GPU.
    """

    stage: int
    kind: StageKind
    layers: tuple[range, ...]
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_by: Mapping[str, int]
    logits: int
    reference: int
    memory_parameters: int
    memory_network: int
    memory_step: int
    reserved: int
    totals: Mapping[str, int]
    must_offload: tuple[str, ...] | None
    optimizer_on_host: int = 0
    staging: int = 0
    reference_on_host: int = 0

    @property
    def static(self) -> int:
        """Weights, gradients and optimizer of the policy."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One rank of one SGLang engine, policy and memory network together.

    `tokens` of cache for one engine; `sequences`: responses in progress (of mean size), and of greatest length.
    `requests` come to one engine in a step, `at_once` of them are decoded together. `largest_fraction` is the most
    `mem_fraction_static` for which all fits beside what the learners leave; None on a CPU, or where the engines have
    GPUs of their own. `context` is assumed for the process itself; `total` is without it, as SGLang takes its share of
    what is free then.
    """

    count: int
    tp: int
    weights: int
    cache: int
    graphs: int
    workspace: int
    context: int
    total: int
    fraction: float | None
    largest_fraction: float | None
    bytes_per_token: int
    tokens: int
    sequences_mean: int
    sequences_longest: int
    requests: float
    at_once: int

    @property
    def asleep(self) -> int:
        """Bytes that stay on its GPU while it sleeps: weights and cache leave, CUDA graphs and the process do not."""
        return self.graphs + self.context


@dataclass(frozen=True, slots=True)
class StageTime:
    """One part of a step; `seconds` None where it is not predicted. `how` says what limits it."""

    name: str
    seconds: float | None
    how: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint's bytes on disk and the seconds to write them, all ranks together."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """An error is a run that will not work; a warning one that may be slow, or fail later."""

    level: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's plan. `step_seconds` and `tokens_per_second_per_gpu` are None on CPUs.

    `rows`: packed tokens of a step; `micro_batches`: of a rank and optimizer step, at least. `host`: bytes a node holds
    of what is offloaded.
    """

    name: str
    world: int
    gpus: int
    gpu_memory: int | None
    parameters: Mapping[str, int]
    stages: tuple[StageMemory, ...]
    engine: EngineMemory | None
    rows: int
    micro_batches: int
    micro_batch_rows: int
    bubble: float
    times: tuple[StageTime, ...]
    step_seconds: float | None
    tokens_per_second_per_gpu: float | None
    checkpoint: Checkpoint
    host: int
    problems: tuple[Problem, ...]

    @property
    def works(self) -> bool:
        """True where no problem is an error."""
        return all(problem.level != "error" for problem in self.problems)

    @property
    def fullest(self) -> int:
        """The most bytes of any stage's GPU in any phase."""
        return max(max(stage.totals.values()) for stage in self.stages)
