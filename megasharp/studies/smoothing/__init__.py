"""Study `smoothing`: the theory of arXiv 2511.19942 (differential smoothing) on random problems.

`policies` holds the optimal policies and measures as functions, `theorem` tries Theorem B.10, the lemmas and the
propositions on random cases, `variance` enumerates the gradients of pass@k objectives, `multiplicity` counts solutions
of Countdown problems, and `study` puts the results beside the paper's words.
"""

from __future__ import annotations

from megasharp.studies.smoothing.policies import (
    DIVERGENCES,
    correctness,
    entropy_policy,
    improvement_probability,
    matching_rate,
    normalised_variance,
    smoothed_policy,
    smoothed_reward,
    vanilla_policy,
)
from megasharp.studies.smoothing.study import STUDY

__all__ = [
    "DIVERGENCES",
    "STUDY",
    "correctness",
    "entropy_policy",
    "improvement_probability",
    "matching_rate",
    "normalised_variance",
    "smoothed_policy",
    "smoothed_reward",
    "vanilla_policy",
]
