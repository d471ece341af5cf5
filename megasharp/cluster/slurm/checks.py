"""What `megasharp doctor` looks at on one node. Each check takes what was read and says what it found. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megasharp.cluster.slurm.gpus import Gpu, Node

# CUDA 13 needs a driver of branch 580 or later (CUDA 13.0 release notes, table of minimum versions).
OLDEST_DRIVER = 580
# What a GPU nobody uses holds: driver and context, below this.
_IDLE_BYTES = 2 << 30
_GB = 1e9
# What pip is asked for where the name alone is too little.
_REQUIREMENTS = {"transformer-engine": "transformer-engine[pytorch,core_cu13]"}

Level = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; a failure's text ends with the remedy."""

    level: Level
    check: str
    text: str


def gpu_count(node: Node, wanted: int) -> Finding:
    """As many GPUs as the run file asks of a node."""
    there = len(node.gpus)
    names = ", ".join(sorted({gpu.name for gpu in node.gpus}))
    if there < wanted:
        return Finding(
            "FAIL",
            "gpus",
            f"{there} GPU(s) are here, the run wants {wanted} (cluster.gpus_per_node or, without it, its ranks and "
            f"engines); ask Slurm for them (--gpus-per-node={wanted}), or take the node out: a GPU that fell off the "
            "bus is missing until the node is rebooted",
        )
    return Finding("ok", "gpus", f"{there} x {names}, driver {node.driver}")


def torchs_gpus(version: str, found: int, there: int, wanted: int) -> Finding | None:
    """Whether torch finds what the driver has; nothing to say where there is nothing to find."""
    if found < wanted or (there and not found):
        level: Level = "FAIL" if wanted else "note"
        remedy = "set CUDA_VISIBLE_DEVICES right, or install a torch that is built for CUDA (pip install torch)"
        return Finding(level, "torch", f"{version} finds {found} GPU(s) of the {there} that are here; {remedy}")
    return Finding("ok", "torch", f"{version} finds {found} GPU(s)") if found else None


def driver(node: Node) -> Finding:
    """New enough for CUDA 13."""
    branch = int(node.driver.split(".")[0]) if node.driver.split(".")[0].isdigit() else 0
    if branch < OLDEST_DRIVER:
        return Finding("FAIL", "driver", f"{node.driver}: CUDA 13 needs {OLDEST_DRIVER} or later; update the driver")
    return Finding("ok", "driver", f"{node.driver} (CUDA 13 needs {OLDEST_DRIVER})")


def gpu_state(gpu: Gpu) -> list[Finding]:
    """Memory that others hold, memory errors, clocks that are held down."""
    name, found = f"gpu {gpu.index}", []
    used = gpu.memory - gpu.free
    if used > _IDLE_BYTES:
        found.append(
            Finding(
                "FAIL", name, f"{used / _GB:.1f} of {gpu.memory / _GB:.0f} GB are taken; end what runs (nvidia-smi)"
            )
        )
    if gpu.ecc_errors:
        found.append(
            Finding("FAIL", name, f"{gpu.ecc_errors} uncorrected memory errors; take the node out and reset this GPU")
        )
    if gpu.slowed:
        found.append(
            Finding("FAIL", name, f"its clocks are held down: {', '.join(gpu.slowed)}; look at cooling and power")
        )
    if not found:
        found.append(Finding("ok", name, f"{gpu.free / _GB:.0f} of {gpu.memory / _GB:.0f} GB free, {gpu.power:.0f} W"))
    return found


def gpu_unread(index: int, reason: str) -> Finding:
    """NVML counts it, but tells nothing of it."""
    return Finding(
        "FAIL",
        f"gpu {index}",
        f"it cannot be read ({reason}); take the node out until it is rebooted, or this GPU reset",
    )


def tested_versions(text: str) -> dict[str, str]:
    """Package to version, of a file of constraints. A line for another Python is left out."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)\s*(?:#.*)?$", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def versions(installed: Mapping[str, str | None], tested: Mapping[str, str]) -> list[Finding]:
    """The packages that decide about numbers against those that the tests ran with; None is not installed."""
    found = []
    for name, version in installed.items():
        wanted = tested.get(name)
        plain = version.partition("+")[0] if version else None
        if version is None:
            wanted = _REQUIREMENTS.get(name, name)
            found.append(Finding("FAIL", "versions", f"{name} is not installed; pip install '{wanted}'"))
        elif wanted is not None and plain != wanted:
            found.append(Finding("note", "versions", f"{name} {version}; tested is {wanted} (constraints.txt)"))
        else:
            found.append(Finding("ok", "versions", f"{name} {version}"))
    return found


def apex(summary: str | None, modules: Sequence[str], failure: str) -> Finding:
    """Which package is called apex. `summary`: of the installed distribution, None where there is none.

    NVIDIA's has `apex.optimizers`; the one on PyPI is a web framework of that name. `failure`: why NVIDIA's cannot be
    imported, empty where it can.
    """
    if summary is None:
        return Finding("ok", "apex", "not installed, which is fine: NVIDIA's is used where it is")
    if "optimizers" not in modules:
        return Finding(
            "FAIL",
            "apex",
            f"this is PyPI's unrelated package ({summary or 'no summary'}), and Megatron would import it; "
            "pip uninstall apex",
        )
    if failure:
        return _not_imported("apex", failure)
    return Finding("ok", "apex", "NVIDIA's")


def transformer_engine(failure: str) -> Finding:
    """It is installed, and cannot be imported because of `failure`."""
    return _not_imported("transformer-engine", failure)


def _not_imported(package: str, failure: str) -> Finding:
    """Megatron goes on without where the import says that something is missing, and ends at any other error."""
    return Finding(
        "FAIL",
        package,
        f"installed, but Megatron cannot import its optimizers ({failure}); build it for this torch, or pip uninstall "
        f"{package}",
    )


def fused_paths(transformer_engine: bool, nvidia_apex: bool, on_gpu: bool, layers: bool) -> list[Finding]:
    """Which computations are fused, and why.

    The first two: whether Megatron can import optimizers from there. `layers`: whether those of the model are
    Transformer Engine's.
    """
    if transformer_engine or nvidia_apex:
        whose = "Transformer Engine's" if transformer_engine else "apex's"
        adam = f"{whose} fused one, because it is installed and can be imported"
    else:
        ours = "torch's fused kernel" if on_gpu else "torch's grouped operations"
        adam = f"{ours}, because neither Transformer Engine's nor NVIDIA apex's can be imported"
    where = "" if on_gpu else " (no GPU is used)"
    norms = (
        "Transformer Engine's, with the linear maps behind them (policy.transformer_engine)"
        if layers
        else "torch's rms_norm, because the layers are Megatron's local ones"
    )
    attention = (
        "torch's variable-length flash kernels in bfloat16, its scaled-dot-product attention in float32"
        if on_gpu
        else "our packed attention in torch, because responses share their prompt's keys"
    )
    return [
        Finding("ok", "fused", f"Adam: {adam}{where}"),
        Finding("ok", "fused", f"norms: {norms}"),
        Finding("ok", "fused", "gradient accumulation: not fused; the model sets gradient_accumulation_fusion=False"),
        Finding("ok", "fused", f"attention: {attention}"),
    ]


def disk_space(path: str, free: int, checkpoint: int) -> Finding:
    """Room for two checkpoints: the newest stays until the next is complete. Bytes."""
    needed = 2 * checkpoint
    text = f"{path}: {_size(free)} free, two checkpoints take {_size(needed)}"
    if free < needed:
        return Finding("FAIL", "disk", f"{text}; free space or set --runs")
    return Finding("ok", "disk", text)


def _size(count: int) -> str:
    """Bytes, such that a small model's are not 0.0."""
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / 1e6:.1f} MB"


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second of an all-reduce of `size` bytes: size / time x 2 (n - 1) / n (nccl-tests, PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def all_reduce(ranks: int, bandwidth: float, expected: float | None, where: str) -> Finding:
    """Against `expected` bytes per second, of which half is demanded; None: there is nothing to compare with."""
    text = f"{ranks} ranks {where}: bus bandwidth {bandwidth / _GB:.2f} GB/s"
    if expected is None:
        return Finding("ok", "all-reduce", f"{text}; no expected value for gloo on CPUs")
    if bandwidth < expected / 2:
        return Finding(
            "FAIL",
            "all-reduce",
            f"{text}, expected about {expected / _GB:.0f}; NCCL_DEBUG=INFO says which interface and adapters are used",
        )
    return Finding("ok", "all-reduce", f"{text}, expected about {expected / _GB:.0f}")


def mounts(missing: Sequence[str]) -> Finding:
    """Folders that the run names must be seen from here, in a container too."""
    if missing:
        return Finding(
            "FAIL", "mounts", f"not seen here: {', '.join(missing)}; mount them into the container (submit --mount)"
        )
    return Finding("ok", "mounts", "every folder that the run file names is seen")
