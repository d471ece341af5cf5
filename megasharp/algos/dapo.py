"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, a token mean and soft overlong punishment on GRPO; a bundle.

Printed: the four parts, clip [1 - 0.2, 1 + 0.28], no KL penalty, rewards +1 / -1 with a length penalty of up to -1.
From the authors' scripts, not the paper: tokens of negative advantage are bounded a second time, at ratio 10 (dual
clip); `clip: {dual: null}` leaves that out. Ours: rewards here are 1 / 0, so the length penalty's factor is 0.5, which
gives the advantages that DAPO's rewards give with a factor of 1; where a task's rewards span 2, set
`soft_overlong: {factor: 1.0}`. Lengths are the run's response limit and a fifth of it, the paper's proportion.

It differs from GRPO in these parts alone. A value in the table of a part overrides the bundle's.
"""

from __future__ import annotations

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.clip import ClipParams
from megasharp.algos.dynamic_sampling import DynamicSamplingParams
from megasharp.algos.grpo import GRPOParams
from megasharp.algos.soft_overlong import SoftOverlongParams


class DAPO(Method[MethodParams]):
    """Bundle of grpo, clip, dynamic_sampling and soft_overlong."""

    paper = "2503.14476"
    status = "as printed; the dual clip from the authors' scripts"
    options = "it brings grpo, clip, dynamic_sampling and soft_overlong; set their tables to change its values."
    reduction = Reduction.TOKEN_MEAN
    brings = {
        "grpo": GRPOParams(),
        "clip": ClipParams(low=0.2, high=0.28, dual=10.0),
        "dynamic_sampling": DynamicSamplingParams(),
        "soft_overlong": SoftOverlongParams(factor=0.5),
    }
