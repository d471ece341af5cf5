"""GPUs of a node and their driver."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megasharp.cluster.slurm.doctor.findings import GB, Finding, Level
from megasharp.cluster.slurm.gpus import Gpu, Node, opened
from megasharp.common.errors import UserError

# The oldest driver branch of each major version of CUDA (CUDA 13.0 release notes, tables of minimum versions).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
# Below this, a GPU's memory is held by driver and context alone.
_IDLE_BYTES = 2 << 30


def read_gpus() -> Node | str:
    """Return this node's GPUs and driver; a line where there are none to be read."""
    try:
        with opened() as nvml:
            return nvml.read()
    except UserError as error:
        return str(error)


def check_gpus(node: Node | str, wanted: int) -> Iterator[Finding]:
    """Yield the findings of GPUs, driver and this Python's torch."""
    if isinstance(node, str):
        yield Finding("FAIL" if wanted else "note", "gpus", node)
        return
    yield gpu_count(node, wanted)
    seen = torchs_gpus(torch.__version__, torch.cuda.device_count(), len(node.gpus), wanted)
    if seen is not None:
        yield seen
    yield driver(node, torch.version.cuda, "the trainer's torch")
    for gpu in node.gpus:
        yield from gpu_state(gpu)
    for index, reason in node.unread:
        yield gpu_unread(index, reason)


def gpu_count(node: Node, wanted: int) -> Finding:
    """Check for as many GPUs as the run file asks of a node."""
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
    """Compare torch's GPUs with the driver's; None where there is nothing to find."""
    if found < wanted or (there and not found):
        level: Level = "FAIL" if wanted else "note"
        remedy = "set CUDA_VISIBLE_DEVICES right, or install a torch that is built for CUDA (pip install torch)"
        return Finding(level, "torch", f"{version} finds {found} GPU(s) of the {there} that are here; {remedy}")
    return Finding("ok", "torch", f"{version} finds {found} GPU(s)") if found else None


def driver(node: Node, cuda: str | None, whose: str) -> Finding:
    """Check that the driver runs what `whose` torch was built for: `cuda` is its version, None for CPUs alone.

    `node.cuda`, where it is known, counts NVIDIA's compatibility package, which the driver's own version does not.
    """
    if cuda is None:
        return Finding("note", "driver", f"{node.driver}; {whose} is not built for CUDA")
    major = int(cuda.partition(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    branch = int(node.driver.partition(".")[0]) if node.driver.partition(".")[0].isdigit() else 0
    enough = node.cuda // 1000 >= major if node.cuda else oldest is None or branch >= oldest
    needs = f"CUDA {cuda} of {whose}"
    if not enough:
        least = f"branch {oldest} or later" if oldest else "a later one"
        return Finding(
            "FAIL",
            "driver",
            f"{node.driver}: {needs} needs {least}; update the driver, install cuda-compat-{major}, or take a torch "
            "that is built for an older CUDA",
        )
    return Finding("ok", "driver", f"{node.driver} runs {needs}" + (f" (branch {oldest} or later)" if oldest else ""))


def gpu_state(gpu: Gpu) -> list[Finding]:
    """Check a GPU for memory that others hold, memory errors, and clocks that are held down."""
    name, found = f"gpu {gpu.index}", []
    used = gpu.memory - gpu.free
    if used > _IDLE_BYTES:
        found.append(
            Finding("FAIL", name, f"{used / GB:.1f} of {gpu.memory / GB:.0f} GB are taken; end what runs (nvidia-smi)")
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
        found.append(Finding("ok", name, f"{gpu.free / GB:.0f} of {gpu.memory / GB:.0f} GB free, {gpu.power:.0f} W"))
    return found


def gpu_unread(index: int, reason: str) -> Finding:
    """Report a GPU that NVML counts but cannot read."""
    return Finding(
        "FAIL",
        f"gpu {index}",
        f"it cannot be read ({reason}); take the node out until it is rebooted, or this GPU reset",
    )
