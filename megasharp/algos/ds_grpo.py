"""DS-GRPO (arXiv 2511.19942): GRPO with differential smoothing, a wider upper clip and the token mean; a bundle.

Printed for the paper's math runs: clip [1 - 0.2, 1 + 0.25] (0.22 for Ministral-8B), "length-dependent loss aggregation"
as DAPO's, no KL penalty (0.001 for Ministral-8B), two or one optimizer steps per batch, gammas 0.01 and 0.01. The
Countdown runs have clip 0.2 on both sides and gammas 0.03 and 0.01. Unknown: the divisor of the deviation. The code of
a co-author has the population's (`grpo: {std: population}`); here it is the estimator's default, so that a run differs
from GRPO only in what the paper changes. With both gammas at 0 this is GRPO under the same clip.
"""

from __future__ import annotations

from megasharp.algos.base import Method, MethodParams, Reduction
from megasharp.algos.clip import ClipParams
from megasharp.algos.ds import DSParams
from megasharp.algos.grpo import GRPOParams


class DSGRPO(Method[MethodParams]):
    """GRPO, differential smoothing, clip-higher and the token mean."""

    paper = "2511.19942"
    status = "as printed; the form of the term from the authors' code"
    options = "it brings grpo, clip and ds; set their tables to change its values."
    reduction = Reduction.TOKEN_MEAN
    brings = {
        "grpo": GRPOParams(),
        "clip": ClipParams(low=0.2, high=0.25),
        "ds": DSParams(gamma_p=0.01, gamma_n=0.01),
    }
