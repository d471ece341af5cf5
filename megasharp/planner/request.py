"""What a plan is asked for: networks, layout, batch, engines, machines, and the rates that are assumed.

GPUs the planner knows, by name, from NVIDIA's data sheets; any other is given by its memory in MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megasharp.common.errors import UserError
from megasharp.common.records import ParallelLayout
from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.convert.lora import LoraSettings
from megasharp.planner.formulas import CORE_ATTENTION, Lengths, Modules, Recompute


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its links. Memory in bytes, rates in bytes or operations per second and per GPU.

    `flops`: bfloat16, dense. `nvlink`: to the GPUs of its node, both directions together as data sheets give it.
    `network`: to other nodes, one direction. `memory` is the data sheet's in decimal GB, a little below what is there.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    nvlink: float
    network: float


# 400 Gbit/s of InfiniBand for each GPU, as an eight-GPU node with eight NDR adapters has.
_NDR = 50e9

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H200 data sheet (SXM): 141 GB HBM3e, 4.8 TB/s, 989 TFLOPS, 900 GB/s.
        Gpu("h200", 141e9, 4.8e12, 989e12, 900e9, _NDR),
        # NVIDIA H100 data sheet (SXM): 80 GB HBM3, 3.35 TB/s, 989 TFLOPS, 900 GB/s.
        Gpu("h100", 80e9, 3.35e12, 989e12, 900e9, _NDR),
        # NVIDIA HGX B200: 180 GB of HBM3e in use, 8 TB/s, 2,250 TFLOPS, 1,800 GB/s.
        Gpu("b200", 180e9, 8.0e12, 2250e12, 1800e9, _NDR),
    )
}
DEFAULT = "h200"


def find_gpu(text: str) -> Gpu:
    """The GPU of this name, or an H200 with so many MiB of memory. Raises UserError for anything else."""
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
