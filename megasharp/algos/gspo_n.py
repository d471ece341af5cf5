"""GSPO-N: GSPO that trains on relative negatives alone (arXiv 2510.04028, section 4.1 and appendix B.5).

A bundle: grpo's advantages, gspo's ratio and clip, negative_only, and the reduction that both papers print. The paper
states a clip of 0.2 for all its runs and none for GSPO, whose ratio would never reach it: gspo's own bounds stay.
"""

from __future__ import annotations

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.negative_only import NegativeOnlyParams


class GSPON(Method[MethodParams]):
    """Bundle of grpo, gspo and negative_only."""

    paper = "2510.04028"
    status = "as printed; its clip is not given, GSPO's own"
    options = "it brings grpo, gspo and negative_only."
    reduction = Reduction.SEQ_MEAN_TOKEN_MEAN
    brings = {"grpo": MethodParams(), "gspo": MethodParams(), "negative_only": NegativeOnlyParams()}
