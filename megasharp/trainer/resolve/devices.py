"""The devices that a run computes on: this machine's GPUs where there are any, or its CPUs, and threads on those."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch

from megasharp.common import control_group
from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture

# Below this size a step is thousands of operations of some microseconds, and threads cost more than they bring: a
# step of the quickstart (0.6 million parameters, two cores) took 0.40 s on one thread and 0.52 s on two. Threads that
# wait for each other also suffer most when anything else runs on the machine.
ONE_THREAD_BELOW = 4_000_000


# Before anything has changed it: OMP_NUM_THREADS where set, else the physical cores.
_TORCH_THREADS = torch.get_num_threads()


def available_cores() -> int:
    """Return the number of cores that this process is to compute on: OMP_NUM_THREADS, where set, decides.

    Else a job of Slurm has those that it asked for, also where Slurm does not bind it to them.
    """
    limits = [float(_TORCH_THREADS)]
    if not os.environ.get("OMP_NUM_THREADS"):
        quota = control_group.core_limit()
        limits += [] if quota is None else [quota]
        if "SLURM_JOB_ID" in os.environ:
            given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "")
            limits += [int(given)] if given.isdecimal() else []
    return max(1, int(min(limits)))


def machine_memory() -> int:
    """Return the bytes of memory that this machine has, or that this process's control group leaves of them."""
    limit, there = control_group.memory_limit(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return there if limit is None else min(there, limit)


def cpu_threads(architecture: Architecture, processes: int, deterministic: bool) -> int:
    """Return the threads for one of `processes` processes that compute at the same time.

    They share OMP_NUM_THREADS, where set. Deterministic runs get one each, because sums depend on the number of
    threads, and that would depend on the machine.
    """
    if deterministic:
        return 1
    if not os.environ.get("OMP_NUM_THREADS") and architecture.parameter_count() < ONE_THREAD_BELOW:
        return 1
    return max(1, available_cores() // processes)


def limit_threads(architecture: Architecture, deterministic: bool = False) -> None:
    """Apply `cpu_threads` to this process."""
    torch.set_num_threads(cpu_threads(architecture, 1, deterministic))


Device = Literal["cpu", "cuda"]
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(config: RunConfig) -> Device:
    """Return where the policy trains and engines run; `auto`: GPUs if the file asks for any or this machine has any."""
    if config.policy.device != "auto":
        return config.policy.device
    here = config.cluster.backend == "local" and torch.cuda.is_available()
    return "cuda" if here or asks_for_gpus(config) else "cpu"


# Replicas on a CPU: at most so many, each with so many prompts of a step.
MOST_REPLICAS, PROMPTS_EACH = 4, 8


def splits_over_cores(config: RunConfig) -> bool:
    """Return whether a run that leaves `policy.dp` open may have several replicas on the CPUs of this machine."""
    policy = config.policy
    return (
        policy.dp is None
        and policy.ranks == 1
        and config.cluster.backend == "local"
        and config.rollout.engine == "inprocess"
        and not config.deterministic
        and device_of(config) == "cpu"
        and min(available_cores(), config.data.prompts_per_step // PROMPTS_EACH) > 1
    )


def gpu_memory_mib() -> int | None:
    """Return the memory of this machine's first GPU in MiB; None where it has none."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory // 2**20)


def leave_gpus_alone(config: RunConfig) -> None:
    """Hide this machine's GPUs from this process and those that it starts, for a run that computes on CPUs.

    Call it before anything has asked torch for GPUs, whose first answer stays. Libraries that look for GPUs themselves,
    such as Megatron, then find none, as on the machines on which CPU runs are tested.
    """
    if device_of(config) == "cpu":
        os.environ[_VISIBLE] = ""


def asks_for_gpus(config: RunConfig) -> bool:
    """Return whether the file itself asks for GPUs, whatever the machine that reads it has."""
    return config.policy.device == "cuda" or (config.policy.device == "auto" and config.cluster.gpus_per_node > 0)


def sampling_device(wanted: Device | None = None) -> torch.device:
    """Return the device that this process itself samples on: its first GPU unless `cpu` is wanted or it has none."""
    return torch.device("cpu" if wanted == "cpu" or not torch.cuda.is_available() else "cuda:0")


def visible_gpus() -> list[str]:
    """Return CUDA's names of the GPUs that this process may use: the driver's numbers, or UUIDs where these are set."""
    text, count = os.environ.get(_VISIBLE), torch.cuda.device_count()
    # CUDA stops reading at the first name that it does not know, so the list may be longer than the count.
    return [str(number) for number in range(count)] if text is None else [n.strip() for n in text.split(",")][:count]


def gpus_here(config: RunConfig) -> list[str]:
    """Return the GPUs of this machine that a run without a cluster may use, by CUDA's names.

    Raises:
        UserError: there are none, or fewer than `cluster.gpus_per_node` says.
    """
    gpus = visible_gpus() if torch.cuda.is_available() else []
    wanted = config.cluster.gpus_per_node
    if not gpus:
        key = "policy.device=cuda" if config.policy.device == "cuda" else f"cluster.gpus_per_node={wanted}"
        raise UserError(f"{key}, but torch finds no GPU on this machine; set policy.device=cpu")
    if wanted > len(gpus):
        raise UserError(f"cluster.gpus_per_node={wanted}, but this machine has {len(gpus)} GPU(s); lower it")
    return gpus[:wanted] if wanted else gpus


def gpus_needed(config: RunConfig) -> int:
    """Return the number of GPUs that ranks and engines take, without a cluster."""
    ranks, engines = _ranks_and_engines(config)
    return max(ranks, engines) if config.cluster.placement == "colocated" else ranks + engines


def _ranks_and_engines(config: RunConfig) -> tuple[int, int]:
    """Return the number of GPUs of the policy's ranks, and of the engines' ranks."""
    policy, rollout = config.policy, config.rollout
    engines = rollout.engines * rollout.tp if rollout.engine == "sglang" else 0
    return policy.ranks, engines


def check_enough(config: RunConfig, gpus: Sequence[str]) -> None:
    """Refuse ranks and engines that want more than these GPUs of one machine. Raises UserError, naming the keys."""
    ranks, engines = _ranks_and_engines(config)
    needed = gpus_needed(config)
    sizes = f"policy.dp x tp x pp x cp = {ranks}" + (f", rollout.engines x tp = {engines}" if engines else "")
    if needed > len(gpus):
        how = f", {config.cluster.placement}" if engines else ""
        raise UserError(
            f"{sizes}{how}: {needed} GPUs, but without cluster.backend=ray the run has the {len(gpus)} of this machine "
            "that it may use; lower these"
        )


def check_names(config: RunConfig, gpus: Sequence[str]) -> None:
    """Refuse UUIDs for engines of several ranks: SGLang 0.5.21's own all-reduce reads the names as numbers."""
    rollout = config.rollout
    unnumbered = next((name for name in gpus if not name.isdecimal()), None)
    if rollout.engine == "sglang" and rollout.tp > 1 and unnumbered is not None:
        raise UserError(
            f"rollout.tp={rollout.tp}: SGLang wants {_VISIBLE} as numbers, as nvidia-smi counts GPUs, and it has "
            f"{unnumbered}; set it so, or rollout.tp=1"
        )
