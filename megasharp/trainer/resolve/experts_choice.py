"""Refuses keys of a mixture of experts that the model, its layout or the run's device cannot have."""

from __future__ import annotations

from collections.abc import Iterator

from megasharp.common.errors import UserError
from megasharp.config.policy import ExpertsConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.trainer.resolve.devices import device_of

# Adapters of these would have to be one for each expert.
_EXPERTS_MAPS = ("fc1", "fc2")


def check_experts(config: RunConfig, architecture: Architecture, where: str) -> None:
    """Raise UserError, in one line, for the first of the policy's keys that does not suit its model's experts."""
    found = _faults_of_mixture(config) if architecture.experts else _keys_without_effect(config.policy.experts)
    for fault in found:
        raise UserError(f"{where}: {fault}")


def _keys_without_effect(keys: ExpertsConfig) -> Iterator[str]:
    for name, value in keys:
        if value != type(keys).model_fields[name].default:
            yield f"policy.experts.{name}={value} has no effect: the model has no experts; leave it out"


def _faults_of_mixture(config: RunConfig) -> Iterator[str]:
    policy, keys = config.policy, config.policy.experts
    layout = policy.layout
    adapted = [target for target in policy.lora.targets if target in _EXPERTS_MAPS] if policy.lora else []
    if adapted:
        yield (
            f"policy.lora.targets: {adapted[0]} is in the experts, which have no adapters here: set it to [qkv, proj]"
        )
    if keys.dispatcher == "allgather" and layout.tp * layout.cp % (layout.ep * layout.etp):
        yield (
            "policy.experts.dispatcher=allgather needs ranks with equally many tokens, and micro-batches of "
            f"data-parallel ranks differ: policy.ep={layout.ep} x policy.etp={layout.etp} must divide tp x cp = "
            f"{layout.tp * layout.cp}; set it to alltoall"
        )
    if keys.dispatcher == "deepep" and device_of(config) != "cuda":
        yield "policy.experts.dispatcher=deepep needs GPUs: set it to alltoall"
    if keys.dispatcher == "deepep" and layout.ep * layout.etp == 1:
        yield "policy.experts.dispatcher=deepep exchanges tokens between ranks, but policy.ep and policy.etp are 1"
    if keys.replay and policy.recompute == "selective" and "mlp" in policy.recompute_modules and policy.pp > 1:
        yield (
            "policy.experts.replay with policy.recompute=selective and policy.pp above 1: experts computed again would "
            "be another micro-batch's; set policy.recompute to full or none"
        )
