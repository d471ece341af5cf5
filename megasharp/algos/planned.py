"""Methods whose tables may already stand in a run.yaml, but which no file implements yet.

Their parameters parse, so that a configuration can be written and checked today; naming one in `recipe.methods` is
refused with one line when the recipe is built. A method leaves this page when its own file arrives.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megasharp.algos.base import MethodParams


class IACParams(MethodParams):
    """Inverse-success advantage calibration (2601.15609): exponent and form of the weight."""

    alpha: float = Field(default=1.0, ge=0.0)
    form: Literal["normalized", "literal", "budget"] = "normalized"


PLANNED: dict[str, type[MethodParams]] = {
    "iac": IACParams,
    **dict.fromkeys(
        (
            "dr_grpo", "rloo", "reinforce_pp_baseline", "psr", "nsr", "w_reinforce", "passk_training", "gr_pkpo",
            "pkpo", "grpo_best_of", "dapo", "grpo_n", "gspo_n", "ds_grpo", "unlikeliness", "soft_overlong",
            "dynamic_sampling", "difficulty_filter", "ds", "entropy_adv", "negative_only", "casp", "gspo", "cispo",
            "clip_cov", "kl_cov", "reinforce", "forking_tokens", "entropy_bonus", "entropy_penalty",
            "differential_entropy", "truncated_is", "bypass",
        ),
        MethodParams,
    ),
}  # fmt: skip
