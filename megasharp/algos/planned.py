"""Methods whose tables may already stand in a run.yaml, but which no file implements yet.

Their parameters parse, so that a configuration can be written and checked today; naming one in `recipe.methods` is
refused with one line when the recipe is built. A method leaves this page when its own file arrives.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megasharp.algos.base import MethodParams
from megasharp.config.core import Section


class IACParams(MethodParams):
    """Inverse-success advantage calibration (2601.15609): exponent and form of the weight."""

    alpha: float = Field(default=1.0, ge=0.0)
    form: Literal["normalized", "literal", "budget"] = "normalized"


class MemoryParams(Section):
    """The memory network of DLC: where it starts from, its learning rate, its tensor parallelism."""

    path: str = "examples/quickstart/memory"
    lr: float = Field(default=2.0e-4, gt=0.0)
    tp: int = Field(default=1, ge=1)


class DLCParams(MethodParams):
    """Sampling with a memory network's logits subtracted (2601.15609)."""

    mu: float = 0.2
    memory: MemoryParams = MemoryParams()
    plausible: float | None = None


PLANNED: dict[str, type[MethodParams]] = {
    "iac": IACParams,
    "dlc": DLCParams,
    **dict.fromkeys(
        (
            "dr_grpo", "rloo", "reinforce_pp_baseline", "psr", "nsr", "w_reinforce", "passk_training", "gr_pkpo",
            "pkpo", "grpo_best_of", "dapo", "grpo_n", "gspo_n", "ds_grpo", "unlikeliness", "soft_overlong",
            "dynamic_sampling", "difficulty_filter", "ds", "entropy_adv", "negative_only", "casp", "gspo", "cispo",
            "clip_cov", "kl_cov", "reinforce", "forking_tokens", "entropy_bonus", "entropy_penalty",
            "differential_entropy", "truncated_is",
        ),
        MethodParams,
    ),
}  # fmt: skip
