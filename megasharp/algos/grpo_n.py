"""GRPO-N: GRPO that trains on relative negatives alone (arXiv 2510.04028, section 4.1 and appendix B.5).

A bundle: grpo and negative_only, with the reduction that the paper prints, 1/G sum_i 1/|y_i| sum_t. The clip is the
default's 0.2, which the paper states for all its runs; its KL penalty (0.001) and entropy bonus (0.0001) are methods of
their own. The printed gradient is that of the unclipped ratio, the runs clip.
"""

from __future__ import annotations

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.negative_only import NegativeOnlyParams


class GRPON(Method[MethodParams]):
    """Bundle of grpo and negative_only."""

    paper = "2510.04028"
    options = "it brings grpo and negative_only."
    reduction = Reduction.SEQ_MEAN_TOKEN_MEAN
    brings = {"grpo": MethodParams(), "negative_only": NegativeOnlyParams()}
