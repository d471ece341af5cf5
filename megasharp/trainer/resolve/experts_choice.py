"""Refuses keys of a mixture of experts that the model, its layout or the run's device cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megasharp.common.errors import UserError
from megasharp.config.policy import ExpertsConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.planner.mixtures import faults_of_layout
from megasharp.trainer.resolve.devices import device_of

# Adapters of these would have to be one for each expert.
_EXPERTS_MAPS = ("fc1", "fc2")


def check_experts(config: RunConfig, policy: Architecture, where: str, *, here: bool) -> None:
    """Raise UserError, in one line, for the first of the policy's keys that does not suit its model's experts.

    `here`: the run is to start in this Python.
    """
    found = _faults_of_mixture(config) if policy.experts else _keys_without_effect(config.policy.experts)
    for fault in found:
        raise UserError(f"{where}: {fault}")
    if here and config.policy.experts.dispatcher == "deepep" and not find_spec("deep_ep"):
        raise UserError(
            f"{where}: policy.experts.dispatcher=deepep needs the package deep_ep (DeepEP), which this Python has not: "
            "install it, or set it to alltoall"
        )


def _keys_without_effect(keys: ExpertsConfig) -> Iterator[str]:
    for name, value in keys:
        if value != type(keys).model_fields[name].default:
            yield f"policy.experts.{name}={value} has no effect: the model has no experts; leave it out"


def _faults_of_mixture(config: RunConfig) -> Iterator[str]:
    policy = config.policy
    adapted = [target for target in policy.lora.targets if target in _EXPERTS_MAPS] if policy.lora else []
    if adapted:
        yield (
            f"policy.lora.targets: {adapted[0]} is in the experts, which have no adapters here: set it to [qkv, proj]"
        )
    if policy.experts.dispatcher == "deepep" and device_of(config) != "cuda":
        yield "policy.experts.dispatcher=deepep needs GPUs: set it to alltoall"
    yield from faults_of_layout(policy)
