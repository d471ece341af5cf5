"""Methods whose tables may already stand in a run.yaml, but which no file implements yet.

Their parameters parse, so that a configuration can be written and checked today; naming one in `recipe.methods` is
refused with one line when the recipe is built. A method leaves this page when its own file arrives.
"""

from __future__ import annotations

from megasharp.algos.base import MethodParams

PLANNED: dict[str, type[MethodParams]] = {
    **dict.fromkeys(
        (
            "dr_grpo", "rloo", "reinforce_pp_baseline", "psr", "nsr", "w_reinforce", "passk_training", "gr_pkpo",
            "pkpo", "grpo_best_of", "dapo", "unlikeliness", "soft_overlong",
            "dynamic_sampling", "difficulty_filter",
        ),
        MethodParams,
    ),
}  # fmt: skip
