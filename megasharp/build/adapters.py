"""`policy.lora` as learners and planner take it; by itself, because neither needs the other's libraries."""

from __future__ import annotations

from megasharp.config.run import RunConfig
from megasharp.convert.lora import LoraSettings


def lora_settings(config: RunConfig) -> LoraSettings | None:
    """The adapters that are trained, or None where all of the policy's weights are."""
    lora = config.policy.lora
    return LoraSettings(lora.rank, lora.alpha, tuple(lora.targets)) if lora else None
