"""The question to the planner: networks, layout, batch, engines, machines, and the rates that are assumed.

The GPUs that it knows by name are those of NVIDIA's data sheets; any other is given by its memory in MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasharp.common.errors import UserError
from megasharp.common.records import ParallelLayout
from megasharp.config.policy import LoraConfig, PolicyConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.families import Family
from megasharp.planner.formulas import Lengths


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
    """A step's forward passes before the update, for old and reference log-probs, and the recipe's methods by name."""

    methods: tuple[str, ...]
    old_logp: bool
    reference: bool

    @property
    def before(self) -> list[str]:
        """The log-probs that have a pass of their own: "old", "reference"."""
        return ["old"] * self.old_logp + ["reference"] * self.reference


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
    """The rates assumed, as shares of the data sheet's figures; `disk` in bytes per second for all ranks together.

    `mfu`: model FLOPs utilisation of training and prefill outside of pipeline bubbles; 0.40 is the lower end of what
    Megatron-LM reports for dense models on H100s. `bandwidth`: of memory in decoding. `links`: of NVLink and network.
    """

    mfu: float = 0.40
    bandwidth: float = 0.5
    links: float = 0.8
    disk: float = 10e9


@dataclass(frozen=True, slots=True)
class Request:
    """Everything a plan depends on. `width`: bytes of a weight.

    `split`: the run's keys for the layout and for how ranks save memory.
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

    @property
    def layout(self) -> ParallelLayout:
        """The policy's parallel sizes."""
        split = self.split
        return ParallelLayout(split.dp, split.tp, split.pp, split.cp, split.vpp)

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
