"""Memory of a node: what this job's cgroup lets it have, what may be locked, and /dev/shm."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator

import psutil

from megasharp.cluster.slurm.doctor.findings import GB, Finding, Memory, Patient, size_text
from megasharp.common import control_group
from megasharp.common.files import SHARED_MEMORY
from megasharp.common.group_environment import adapters

# Of a rank's or an engine's process on the host: Python, libraries, CUDA's context. An assumption, not measured.
_PROCESS = 4_000_000_000
# NCCL's manual asks for this much of /dev/shm in a container (--shm-size=1g).
_NCCL_SHARED = 1 << 30
# InfiniBand registers its buffers as locked memory; a distribution's default is 64 KiB or 8 MiB.
_LITTLE_LOCKED = 1 << 30


def check_memory(patient: Patient) -> Iterator[Finding]:
    """Yield the findings of this node's memory."""
    yield host_memory(control_group.memory_limit(), psutil.virtual_memory().total, patient.memory)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked_memory(None if soft == resource.RLIM_INFINITY else soft, len(adapters()), patient.nodes)
    try:
        room = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        yield Finding("FAIL", "shared memory", f"{SHARED_MEMORY} is not there; mount a tmpfs as it")
        return
    yield shared_memory(room.total, room.free, patient.memory.shared, patient.gpus_per_node, patient.memory.store)


def host_memory(limit: int | None, total: int, asked: Memory) -> Finding:
    """Compare the memory that this job may take with the plan's. `limit` None: all of the node's `total` bytes."""
    may = total if limit is None else min(limit, total)
    needed = asked.host + asked.processes * _PROCESS
    whole = (
        f"all of the node's {may / GB:.0f} GB" if may == total else f"{may / GB:.0f} of the node's {total / GB:.0f} GB"
    )
    text = f"this job may take {whole}"
    if not needed:
        return Finding("ok", "host memory", text)
    text += (
        f"; {asked.host / GB:.0f} GB are offloaded to it by plan, and {asked.processes} processes take some "
        f"{_PROCESS / GB:.0f} GB each (assumed)"
    )
    remedy = "ask Slurm for all of it (--sbatch=--mem=0)" if may < total else "offload less, or use more nodes"
    if may < asked.host:
        return Finding("FAIL", "host memory", f"{text}: the kernel would end the run; {remedy}")
    if may < needed:
        return Finding("warn", "host memory", f"{text}: the kernel may end the run; {remedy}")
    return Finding("ok", "host memory", text)


def locked_memory(limit: int | None, hcas: int, nodes: int) -> Finding:
    """Check `ulimit -l`, in bytes (None: unlimited), where InfiniBand adapters carry data between nodes."""
    if limit is None:
        return Finding("ok", "locked memory", "unlimited (ulimit -l)")
    text = f"{size_text(limit)} (ulimit -l)"
    if not hcas or nodes < 2:
        return Finding("ok", "locked memory", f"{text}, enough without InfiniBand between nodes")
    remedy = (
        "`ulimit -l unlimited` where you submit, or have the administrator set LimitMEMLOCK=infinity for slurmd and "
        "PropagateResourceLimitsExcept=MEMLOCK"
    )
    if limit < _LITTLE_LOCKED:
        text = f"{text}: InfiniBand cannot register NCCL's buffers (ibv_reg_mr: Cannot allocate memory)"
        return Finding("FAIL", "locked memory", f"{text}; {remedy}")
    return Finding("warn", "locked memory", f"{text}: NCCL's buffers on InfiniBand count against it; {remedy}")


def shared_memory(total: int, free: int, needed: int, gpus: int, store: int = 0) -> Finding:
    """Compare /dev/shm with the run's needs, in bytes: `needed` of Ray and of weights; NCCL's for several `gpus`.

    With less than `store`, Ray's object store does not hold a whole step's batch.
    """
    nccl = _NCCL_SHARED if gpus > 1 else 0
    text = f"{SHARED_MEMORY}: {size_text(free)} of {size_text(total)} free"
    if not needed + nccl:
        return Finding("ok", "shared memory", text)
    text += f"; Ray and buckets of weights take {size_text(needed)}" + (", NCCL up to 1.1 GB" if nccl else "")
    # A small one was mounted so; a full one holds files of processes that have ended.
    small = total < max(needed, store) + nccl
    remedy = (
        "make it larger (docker --shm-size=16g; on the host: mount -o remount,size=50% /dev/shm)"
        if small
        else f"remove what ended processes left there (ls -l {SHARED_MEMORY})"
    )
    if free < needed:
        return Finding("FAIL", "shared memory", f"{text}; {remedy}")
    if free < needed + nccl:
        return Finding("warn", "shared memory", f"{text}: NCCL may find no room; {remedy}")
    if free < store:
        kept = f"Ray's store takes half of it, and wants {size_text(store // 2)} for steps of full length"
        return Finding("warn", "shared memory", f"{text}; {kept}: the rest goes to disk; {remedy}")
    return Finding("ok", "shared memory", text)
