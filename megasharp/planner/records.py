"""The question to the planner and its answer.

A question holds networks, layout, batch, engines, machines, and the rates that are assumed. GPUs known by name have the
rates of NVIDIA's data sheets; any other is given by its memory in MiB. Sizes in an answer are bytes on one GPU (or one
rank of a CPU run) unless said otherwise, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megasharp.common.errors import UserError
from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig, PolicyConfig
from megasharp.config.rollout import Transport as WeightTransport
from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.planner.formulas import KvCache, Lengths


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its links. Memory in bytes, rates in bytes or operations per second and per GPU.

    `flops`: bfloat16, dense. `nvlink`: to the GPUs of its node, both directions together as data sheets give it.
    `network`: to other nodes, one direction. `memory`: all that a process can allocate, torch's `total_memory`.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    nvlink: float
    network: float


# 400 Gbit/s of InfiniBand for each GPU, as an eight-GPU node with eight NDR adapters has.
_NDR = 50e9

_GIB = 2.0**30
# Memory: the "total capacity" that torch's messages of out of memory name (vllm-project/vllm issue 27508 for the H100;
# 139.80 or 139.81 GiB and 178.35 or 178.36 GiB in many logs). The driver keeps the rest of what nvidia-smi prints:
# 143,771, 81,559 and 183,359 MiB. Data sheets say 141, 80 and 180 GB.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H200 data sheet (SXM): 4.8 TB/s, 989 TFLOPS, 900 GB/s.
        Gpu("h200", 139.80 * _GIB, 4.8e12, 989e12, 900e9, _NDR),
        # NVIDIA H100 data sheet (SXM): 3.35 TB/s, 989 TFLOPS, 900 GB/s.
        Gpu("h100", 79.11 * _GIB, 3.35e12, 989e12, 900e9, _NDR),
        # NVIDIA HGX B200: 8 TB/s, 2,250 TFLOPS, 1,800 GB/s.
        Gpu("b200", 178.35 * _GIB, 8.0e12, 2250e12, 1800e9, _NDR),
    )
}
DEFAULT = "h200"


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, or an H200 with so many MiB of memory. Raises UserError for anything else."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    if text.isdigit() and int(text) > 0:
        return replace(GPUS[DEFAULT], name=f"{text} MiB", memory=int(text) * float(2**20))
    raise UserError(f"--gpu {text}: give one of {', '.join(GPUS)}, or its memory in MiB")


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder, and where its sizes were read."""

    name: str
    family: Family
    architecture: Architecture


@dataclass(frozen=True, slots=True)
class Batch:
    """One training step. `oversample` is the share of prompts sampled beyond those wanted."""

    prompts: int
    responses: int
    mini_batches: int
    oversample: float
    lengths: Lengths

    @property
    def sequences(self) -> int:
        """Responses that are trained on."""
        return self.prompts * self.responses


@dataclass(frozen=True, slots=True)
class Passes:
    """A step's forward passes before the update, for old and reference log-probs, and the recipe's methods by name.

    The memory network takes `memory_steps` optimizer steps, and learns the responses of `replay` earlier steps again.
    """

    methods: tuple[str, ...]
    old_logp: bool
    reference: bool
    memory_steps: int = 1
    replay: int = 0

    @property
    def before(self) -> list[str]:
        """The log-probs that have a pass of their own: "old", "reference"."""
        return ["old"] * self.old_logp + ["reference"] * self.reference


@dataclass(frozen=True, slots=True)
class Engines:
    """SGLang engines; None stands for SGLang's own default.

    The run starts `count`; `external` more, taken for equal ones, were started by hand on other GPUs. `most_requests`
    run at once in one engine. `transport` is how weights reach them. `overlap`: they sample while the policy trains.
    `overlap_annotation` is the key of that name. `ep` is `rollout.sglang.ep_size`.
    """

    count: int
    tp: int
    colocated: bool
    transport: WeightTransport
    overlap: bool
    memory_fraction: float | None = None
    most_requests: int | None = None
    pool_tokens: int | None = None
    chunk: int | None = None
    external: int = 0
    overlap_annotation: bool = False
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Machines:
    """`nodes` machines; without `gpu` the run is on CPUs, and times are not predicted."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu | None


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates assumed, as shares of the data sheet's figures unless said otherwise.

    `mfu`, `logp_mfu`: model FLOPs utilisation of update and log-prob passes, outside of pipeline bubbles and of what
    tensor-parallel ranks exchange; of engines `engine_mfu`, in prefill and decoding. `bandwidth`: of memory in
    decoding. `layer_s`: seconds that tensor-parallel ranks of an engine take for one layer of a decode step besides.
    `links`: of NVLink and network. `grouped`: rate of experts' products, many small ones in one kernel, as a share of
    that of dense ones. `sync`: bytes of weights per second that are handed over, besides what links allow.
    `driver_s`: seconds of a step that the driver has alone, with a batch no larger than the published ones. `disk`:
    bytes per second of all ranks.

    All but `links`, `grouped` and `disk` are fitted to published runs by `tools/calibrate_plan.py`, which checks these
    defaults.
    """

    mfu: float = 0.42
    logp_mfu: float = 0.411
    engine_mfu: float = 0.296
    bandwidth: float = 0.723
    layer_s: float = 7.22e-5
    sync: float = 1.22e10
    driver_s: float = 2.44
    links: float = 0.8
    grouped: float = 0.7
    disk: float = 10e9


# Nine of ten published numbers are within these factors of their prediction (`tools/calibrate_plan.py`), by group.
SPREAD: Mapping[str, float] = {"step": 1.18, "learners": 1.19, "engines": 1.23, "weights": 2.01, "driver": 1.45}
# The group of a step's parts; of copies to the host, of which nothing is published alone, that of the weights.
PART_GROUPS: Mapping[str, str] = {
    "rollout": "engines",
    **dict.fromkeys(("annotate", "update", "memory", "context", "experts"), "learners"),
    **dict.fromkeys(("sync", "offload", "reference", "optimizer"), "weights"),
    **{part: part for part in ("driver", "step")},
}


# The one published run with context parallelism (cp 4) took 3.2 to 5.3 times as long as predicted in learners' passes.
CONTEXT_LONGEST = 5.4


def span(part: str, seconds: float) -> tuple[float, float]:
    """The range in which a part of that predicted time is expected, or the "step"."""
    factor = SPREAD[PART_GROUPS[part]]
    return seconds / factor, seconds * factor


def range_text(found: tuple[float, float] | None) -> str:
    """Print a range with three digits, or less than 10 with one decimal: "790 to 1,330"; "?" where there is none."""
    if found is None:
        return "?"
    low, high = (f"{end:.1f}" if end < 10 else f"{round(end, 2 - math.floor(math.log10(end))):,.0f}" for end in found)
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class Kept:
    """The files that a run of `steps` steps has at its end, by number.

    Checkpoints are `every` steps apart; `checkpoints` counts the one that is being written while the oldest is still
    there. `tables` and `token_tables` are of so many steps, by retention; `tokens` is the most of one step that is
    written token by token. `samples` are the bytes that all evaluations of one problem take at most, `samples_bound`
    those of all problems (`eval.keep_mb`).
    """

    steps: int
    every: int
    checkpoints: int
    export_hf: bool
    tables: int
    token_tables: int
    tokens: int
    tensorboard: bool
    samples: int = 0
    samples_bound: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a run in seconds, None where there is none.

    `response`: from a response's first token to its last (`rollout.request_limit_s`). `first_token`: from when an
    engine has a response to its first token (`rollout.first_token_limit_s`, or what stands for null). `parts`: of a
    step's parts, by their names in a plan's times, each with its key.
    """

    response: float | None
    first_token: float | None
    parts: Mapping[str, tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan depends on. `width`: bytes of a weight. `memory_window`: `recipe.dlc.window`.

    `split`: the run's keys for the layout and for how ranks save memory. `longest_evaluated`: the longest response of
    evaluations, where they have a limit of their own.
    """

    name: str
    policy: Network
    memory: Network | None
    width: int
    split: PolicyConfig
    batch: Batch
    passes: Passes
    engines: Engines | None
    machines: Machines
    rates: Rates
    kept: Kept
    limits: Limits
    memory_window: int | None = None
    longest_evaluated: int = 0

    @property
    def layout(self) -> ParallelLayout:
        """The policy's parallel sizes."""
        return self.split.layout

    @property
    def lora(self) -> LoraConfig | None:
        """The policy's adapters; None where all of its weights are trained."""
        return self.split.lora

    @property
    def networks(self) -> list[Network]:
        """The policy, and the memory network where there is one."""
        return [self.policy] if self.memory is None else [self.policy, self.memory]

    @property
    def optimizer_on_host(self) -> bool:
        """True where the optimizer's state is kept in another memory than the weights."""
        return self.split.optimizer_offload and self.machines.gpu is not None

    @property
    def offloaded(self) -> Sequence[str]:
        """The part of `split.offload` that leaves the GPU: nothing where no engine wants the room."""
        return self.split.offload if self.engines is not None and self.engines.colocated else ()


StageKind = Literal["first", "middle", "last", "only"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage's rank. `kind`: first, middle, last, or only where there is one stage.

    `trained`: the policy's parameters that have gradients: all of them, or its adapters. `activations_by`: what they
    would be under each setting of recompute. `memory_network` is all that the memory network keeps (weights, gradients,
    optimizer); `memory_step` what its own micro-batch adds. `reserved` is assumed for CUDA, NCCL and fragmentation.
    `totals`: by phase. `must_offload`: the least that has to leave the GPU while co-located engines sample; None where
    all of it is too little. `optimizer_on_host`: of policy and memory network, where it is not on the GPU, which a step
    then needs `staging` for. `reference_on_host`: the reference's, beside a GPU. `experts`: the parameters of experts
    among those of the policy; `memory_experts`: of the memory network. `dispatch`: bytes of one layer's exchange with
    experts at once. `by_routing`: bytes that a rank holds besides if its experts get twice as many tokens.
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
    experts: int = 0
    memory_experts: int = 0
    dispatch: int = 0
    by_routing: int = 0

    @property
    def static(self) -> int:
        """Weights, gradients and optimizer of the policy."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One rank of one SGLang engine, policy and memory network together.

    `tokens` of cache for one engine, each of `bytes_per_token` on average over a response in progress; `caches` are the
    networks'. `sequences`: responses in progress (of mean size), and of greatest length.
    `requests` come to one engine in a step, `at_once` of them are decoded together. `largest_fraction` is the most
    `mem_fraction_static` for which all fits beside what the learners leave; None on a CPU, or where the engines have
    GPUs of their own. `context` is assumed for the process itself; `total` is without it, as SGLang takes its share of
    what is free then. `experts` are the bytes of the policy's experts among the weights; a token goes to `expert_share`
    of them.
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
    caches: tuple[KvCache, ...]
    bytes_per_token: int
    tokens: int
    sequences_mean: int
    sequences_longest: int
    requests: float
    at_once: int
    experts: int = 0
    expert_share: float = 1.0

    @property
    def asleep(self) -> int:
        """Bytes that stay on its GPU while it sleeps: weights and cache leave, CUDA graphs and the process do not."""
        return self.graphs + self.context


@dataclass(frozen=True, slots=True)
class StageTime:
    """One part of a step; `seconds` None where it is not predicted. `how` says what limits it.

    Its range reaches to `longest` times the prediction at least.
    """

    name: str
    seconds: float | None
    how: str
    longest: float = 1.0

    @property
    def range(self) -> tuple[float, float] | None:
        """The range in which its seconds are expected."""
        if self.seconds is None:
            return None
        low, high = span(self.name, self.seconds)
        return low, max(high, self.longest * self.seconds)


@dataclass(frozen=True, slots=True)
class DlcCost:
    """The memory network's cost in sampling, against engines that hold the policy alone.

    `step`: factor of a decode step of `at_once` responses. `rollout`: of the whole rollout, for which the policy alone
    may have more responses at once; None where it is not predicted. `cache`: bytes of one rank's cache that these
    responses take for the memory network.
    """

    at_once: int
    step: float
    rollout: float | None
    cache: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint's bytes on disk and the seconds to write them, all ranks together.

    `exported`, `exporting`: those of the Hugging Face copy beside it; 0 without one.
    """

    size: int
    seconds: float
    exported: int = 0
    exporting: float = 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """The work that a failure loses: the steps since the last checkpoint, of which there are `every` at most.

    `fewer` steps between checkpoints lose at most an hour, and saving takes the share `saving` of the time then; None
    where `every` loses no more already, or a step is longer.
    """

    every: int
    seconds: float
    fewer: int | None = None
    saving: float | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a run has on disk at its end, of every file that is kept. Evaluations' samples, whose problems a plan
    does not read, are not counted; their figures and logs are small."""

    checkpoints: int
    rollouts: int
    rollout_tokens: int
    metrics: int
    tensorboard: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.checkpoints + self.rollouts + self.rollout_tokens + self.metrics + self.tensorboard


@dataclass(frozen=True, slots=True)
class Transport:
    """A step's batch on its way to the ranks.

    `step`: bytes of all shares. `node`: bytes that the node with most of them gets. `seconds` are part of the driver's,
    None on CPUs. `store`: bytes that Ray's object store needs at most, where ranks are Ray's. `route`: bytes of a
    token's route in a mixture of experts whose routing is replayed, counted in the others; the driver has `routes` of a
    step.
    """

    step: int
    node: int
    seconds: float | None
    store: int
    route: int = 0
    routes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """An error is a run that will not work; a warning one that may be slow, or fail later.

    `limit` is the key of the time limit that it is about, if it is about one.
    """

    level: Literal["error", "warning"]
    text: str
    limit: str | None = None


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
    disk: Disk
    host: int
    problems: tuple[Problem, ...]
    dlc: DlcCost | None = None
    transport: Transport | None = None

    @property
    def packed_tokens_per_second_per_gpu(self) -> float | None:
        """Rate of packed tokens: a prompt once for all of its responses in a micro-batch."""
        return self.rows / self.step_seconds / self.gpus if self.step_seconds else None

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The range in which a step's seconds are expected; parts that may take much longer follow one another."""
        if self.step_seconds is None:
            return None
        low, high = span("step", self.step_seconds)
        return low, high + sum((time.longest - 1) * (time.seconds or 0.0) for time in self.times)

    @property
    def packed_rate_range(self) -> tuple[float, float] | None:
        """The range in which `packed_tokens_per_second_per_gpu` is expected."""
        return self._rates(self.packed_tokens_per_second_per_gpu)

    @property
    def rate_range(self) -> tuple[float, float] | None:
        """The range in which `tokens_per_second_per_gpu` is expected."""
        return self._rates(self.tokens_per_second_per_gpu)

    def _rates(self, rate: float | None) -> tuple[float, float] | None:
        if rate is None or self.step_range is None or self.step_seconds is None:
            return None
        low, high = self.step_range
        return rate * self.step_seconds / high, rate * self.step_seconds / low

    @property
    def works(self) -> bool:
        """True where no problem is an error."""
        return all(problem.level != "error" for problem in self.problems)

    @property
    def ending_seconds(self) -> tuple[float, float]:
        """Seconds of a run that is asked to end, as predicted and at the high end of their range.

        A step past its sampling goes on to its end, then a checkpoint is written.
        """
        rest = [time for time in self.times if time.name != "rollout"]
        predicted = sum(time.seconds or 0.0 for time in rest)
        high = sum(time.range[1] for time in rest if time.range is not None)
        return predicted + self.checkpoint.seconds, high + self.checkpoint.seconds

    @property
    def fullest(self) -> int:
        """The most bytes of any stage's GPU in any phase."""
        return max(max(stage.totals.values()) for stage in self.stages)
