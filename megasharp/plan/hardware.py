"""GPUs the planner knows, by name, from NVIDIA's data sheets; any other is given by its memory in MiB."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megasharp.errors import UserError


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
