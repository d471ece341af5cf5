"""What each rank is told about the learners of a run: the policy's settings, and the memory network's beside them."""

from __future__ import annotations

import dataclasses

from megasharp.algos.base import Needs
from megasharp.build.adapters import lora_settings
from megasharp.build.check import Checked
from megasharp.mcore.learner import LearnerSettings
from megasharp.mcore.model import Fp8
from megasharp.mcore.optimizer import OptimizerSettings
from megasharp.mcore.rank import MEMORY, POLICY
from megasharp.metrics.tokens import Diagnostics
from megasharp.types import as_dtype


def learner_settings(checked: Checked) -> dict[str, LearnerSettings]:
    """Settings by the learner's name on its ranks."""
    policy = _policy(checked)
    if checked.memory is None:
        return {POLICY: policy}
    memory = dataclasses.replace(
        policy,
        folder=str(checked.memory.model.path.absolute()),
        # One step per training step, however many the policy takes.
        optimizer=dataclasses.replace(policy.optimizer, lr=checked.memory.lr, total_steps=checked.config.steps),
        needs=Needs(),
        # Cross-entropy is that of the network as it is; only sampling divides by the rollouts' temperature.
        temperature=1.0,
        diagnostics=None,
        # It is small, and trained whole.
        lora=None,
    )
    return {POLICY: policy, MEMORY: memory}


def _policy(checked: Checked) -> LearnerSettings:
    config = checked.config
    optimizer = config.policy.optimizer
    fp8 = Fp8(config.policy.fp8, config.policy.fp8_recipe) if config.policy.fp8 else None
    return LearnerSettings(
        # Ranks may run in another folder.
        folder=str(checked.model.path.absolute()),
        dtype=as_dtype(config.model.dtype),
        layout=checked.layout,
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            clip_grad=optimizer.clip_grad,
            warmup_steps=optimizer.warmup_steps,
            decay=optimizer.decay,
            total_steps=config.steps * config.recipe.mini_batches,
        ),
        needs=checked.recipes.needs,
        temperature=config.rollout.temperature,
        seed=config.seed,
        recompute=config.policy.recompute,
        offload=tuple(config.policy.offload),
        options=config.policy.megatron,
        diagnostics=Diagnostics(config.log.candidates, config.data.responses_per_prompt),
        lora=lora_settings(config),
        deterministic=config.deterministic,
        head=config.policy.head,
        transformer_engine=config.policy.transformer_engine if fp8 is None else True,
        fp8=fp8,
        overlap=config.policy.overlap,
        optimizer_offload=config.policy.optimizer_offload,
        recompute_modules=tuple(config.policy.recompute_modules),
    )
