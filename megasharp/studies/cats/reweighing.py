"""Weights that 2601.15609 section 4.1 considers and rejects, beside IAC: on wrong samples too, and 1 / pi(label)."""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np

from megasharp.studies.softmax import Floats

# `wrong too`: IAC's (1 - p)^alpha on wrong samples as well, p the share of correct samples. `wrong up`: p^-alpha there,
# which amplifies them where few samples are correct. `correct / pi`, `all / pi`: the idealised inverse probability.
Reweighing = Literal["none", "wrong too", "wrong up", "correct / pi", "all / pi"]

# A sampled label is never less likely than this, except by rounding.
RAREST = 1e-12


def reweigh(kind: Reweighing, reward_RG: Floats, probability_RG: Floats, alpha: float) -> Floats:
    """Return the factors [R, G] on the advantages of samples whose label has `probability_RG` under the policy.

    For `wrong too` and `wrong up` they are those of the wrong samples; correct ones have IAC's own already. A group
    without a correct sample has no advantages under any estimator with negative ones, so its factor does not matter.
    """
    wrong_RG = reward_RG == 0
    right_R1 = reward_RG.mean(axis=-1, keepdims=True)
    inverse_RG = 1.0 / np.maximum(probability_RG, RAREST)
    match kind:
        case "none":
            return np.ones_like(reward_RG)
        case "wrong too":
            return np.where(wrong_RG, (1.0 - right_R1) ** alpha, 1.0)
        case "wrong up":
            return np.where(wrong_RG, np.maximum(right_R1, 1.0 / reward_RG.shape[-1]) ** -alpha, 1.0)
        case "correct / pi":
            return np.where(wrong_RG, 1.0, inverse_RG)
        case "all / pi":
            return np.asarray(inverse_RG)
        case _:
            assert_never(kind)
