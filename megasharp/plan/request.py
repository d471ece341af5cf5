"""What a plan is asked for: networks, layout, batch, engines, machines, and the rates that are assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.lora import LoraSettings
from megasharp.plan.formulas import CORE_ATTENTION, Lengths, Modules, Recompute
from megasharp.plan.hardware import Gpu
from megasharp.types import ParallelLayout


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder, and where its sizes were read."""

    name: str
    family: Family
    architecture: Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(ParallelLayout):
    """A layout, and how its ranks save memory. `offload` leaves the GPU while engines sample.

    `recompute_modules` are those of `selective`. `optimizer_offload`: the optimizer's state is always on the host.
    `head`: whether logits are there all at once or by chunks.
    """

    micro_batch_tokens: int
    recompute: Recompute
    offload: tuple[str, ...]
    recompute_modules: Modules = CORE_ATTENTION
    optimizer_offload: bool = False
    head: Literal["logits", "chunked"] = "logits"

    @property
    def layout(self) -> ParallelLayout:
        """The layout alone."""
        return ParallelLayout(self.dp, self.tp, self.pp, self.cp, self.vpp)


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
    """Which passes a step has besides the update, and what the recipe's methods are, for the text."""

    methods: tuple[str, ...]
    old_logp: bool
    reference: bool


@dataclass(frozen=True, slots=True)
class Engines:
    """SGLang engines; None stands for SGLang's own default.

    `most_requests` run at once in one engine. `transport` is how weights reach them. `overlap`: they sample while the
    policy trains.
    """

    count: int
    tp: int
    colocated: bool
    transport: str
    overlap: bool
    memory_fraction: float | None = None
    most_requests: int | None = None
    pool_tokens: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Machines:
    """`nodes` machines; without `gpu` the run is on CPUs, and times are not predicted."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What is assumed, as shares of the data sheet's figures; `disk` in bytes per second for all ranks together.

    `mfu`: model FLOPs utilisation of training and prefill outside of pipeline bubbles; 0.40 is the lower end of what
    Megatron-LM reports for dense models on H100s. `bandwidth`: of memory in decoding. `links`: of NVLink and network.
    """

    mfu: float = 0.40
    bandwidth: float = 0.5
    links: float = 0.8
    disk: float = 10e9


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan depends on. `width`: bytes of a weight. `lora`: the policy's adapters; None trains it all."""

    name: str
    policy: Network
    memory: Network | None
    width: int
    lora: LoraSettings | None
    split: Split
    batch: Batch
    passes: Passes
    engines: Engines | None
    machines: Machines
    rates: Rates

    @property
    def optimizer_on_host(self) -> bool:
        """Whether it is somewhere else than the weights."""
        return self.split.optimizer_offload and self.machines.gpu is not None

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What of `split.offload` leaves the GPU: nothing where no engine wants the room."""
        return self.split.offload if self.engines is not None and self.engines.colocated else ()
