"""Which devices a run computes on: this machine's GPUs where there are any, or CPUs."""

from __future__ import annotations

import os
from typing import Literal

import torch

from megasharp.config.run import RunConfig
from megasharp.errors import UserError

Device = Literal["cpu", "cuda"]
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(config: RunConfig) -> Device:
    """Where the policy is trained, and engines run. `auto`: on GPUs that the file asks for, or this machine has."""
    if config.policy.device != "auto":
        return config.policy.device
    here = config.cluster.backend == "local" and torch.cuda.is_available()
    return "cuda" if here or asks_for_gpus(config) else "cpu"


def leave_gpus_alone(config: RunConfig) -> None:
    """Hide this machine's GPUs from this process and those that it starts, for a run that computes on CPUs.

    Call it before anything has asked torch for GPUs: the answer to the first question stays. Megatron on a CPU, and
    whatever else looks for itself, then finds the machine that it was tested on.
    """
    if device_of(config) == "cpu":
        os.environ[_VISIBLE] = ""


def asks_for_gpus(config: RunConfig) -> bool:
    """Whether the file itself says so, whatever the machine that reads it has."""
    return config.policy.device == "cuda" or (config.policy.device == "auto" and config.cluster.gpus_per_node > 0)


def sampling_device(wanted: Device | None = None) -> torch.device:
    """Of networks that this process itself samples from: its first GPU unless `cpu` is wanted or it has none."""
    return torch.device("cpu" if wanted == "cpu" or not torch.cuda.is_available() else "cuda:0")


def visible_gpus() -> list[int]:
    """The numbers, as the driver counts them, of the GPUs that this process may use.

    Raises:
        UserError: it is told of them in another way than by numbers.
    """
    text = os.environ.get(_VISIBLE)
    if text is None:
        return list(range(torch.cuda.device_count()))
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError:
        raise UserError(f"{_VISIBLE}={text}: give GPUs by their numbers, as nvidia-smi counts them") from None


def gpus_here(config: RunConfig) -> list[int]:
    """The GPUs of this machine that a run without a cluster may use, by the driver's numbers.

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
