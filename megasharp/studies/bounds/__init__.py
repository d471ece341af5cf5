"""Study `bounds`: the theorems of arXiv 2601.15609 on random cases, and its appendices E and F on a model.

`sharpening` and `coupling` hold the theorems as functions and try them on random cases, `accuracy` looks at Z by the
batch's accuracy, `gradients` measures the kernel of a model, `transfer` what one question's update does to another,
and `study` puts the results beside the paper's words.
"""

from __future__ import annotations

from megasharp.studies.bounds.coupling import (
    KernelBounds,
    logit_shift,
    seen_lower_bound,
    spectral_bounds,
    suppression_ratio,
    uniform_suppression_ratio,
    unseen_upper_bound,
)
from megasharp.studies.bounds.sharpening import (
    Sharpening,
    batch_partition,
    batch_policy,
    classify,
    interpolate,
    normalised_partition_lower_bound,
    optimal_policy,
    partition_lower_bound,
    probability_gap,
)
from megasharp.studies.bounds.study import STUDY

__all__ = [
    "STUDY",
    "KernelBounds",
    "Sharpening",
    "batch_partition",
    "batch_policy",
    "classify",
    "interpolate",
    "logit_shift",
    "normalised_partition_lower_bound",
    "optimal_policy",
    "partition_lower_bound",
    "probability_gap",
    "seen_lower_bound",
    "spectral_bounds",
    "suppression_ratio",
    "uniform_suppression_ratio",
    "unseen_upper_bound",
]
