"""The world of 2601.15609 section 3.4: four labels, inputs with fixed features, a reward, group advantages.

The paper's feature vectors are lost in its text. It says: Persian and Siamese align with the Cat superclass and differ
in subclass dimensions; dimension 1 is Persian's, dimension 3 Siamese's; similarity moves mass from 1 to 3. Ours are the
simplest that fit (the coordinates are superclass cat, Persian, Dog, Siamese). Labels have no features here: a linear
classifier has a row of weights for each. That the paper's labels enter through their features cannot be excluded.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from megasharp.labs.softmax import Array, Integers

LABELS = ("Cat", "Dog", "Persian", "Siamese")
CAT, PERSIAN, SIAMESE = 0, 2, 3
CORRECT = (CAT, PERSIAN)

PERSIAN_INPUT = np.array([1.0, 1.0, 0.0, 0.0])
# Ours: how much of Persian's own coordinate the Siamese input has moved to its own.
SHIFTS = {"High": 0.2, "Mid": 0.5, "Low": 0.8}

# verl's constants: GRPO's guard on the standard deviation, and that of its batch whitening.
STD_EPSILON, VARIANCE_EPSILON = 1e-6, 1e-8

Estimator = Literal["raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline"]
ESTIMATORS: tuple[Estimator, ...] = ("raw", "mean-shifted", "normalised", "RLOO", "RF++-baseline")
DISTINCT_ESTIMATORS = ESTIMATORS[:-1]
IACForm = Literal["normalized", "literal"]


def siamese_input(shift: float) -> Array:
    """Features of the held-out Siamese input; `shift` 0 would make it Persian's, 1 as far from it as can be."""
    return np.array([1.0, 1.0 - shift, 0.0, shift])


def rewards(label_RG: Integers) -> Array:
    """1 for a correct label of a Persian input, the superclass or the subclass; else 0."""
    return np.isin(label_RG, CORRECT).astype(np.float64)


def advantages(estimator: Estimator, reward_RG: Array) -> Array:
    """Group advantages along the last axis.

    raw: r. mean-shifted: r - mean. normalised: (r - mean) / (std + 1e-6), unbiased std (GRPO). RLOO: each reward less
    the mean of the others. RF++-baseline: r - mean, whitened over the batch; a step here is one group, so that it is
    the normalised estimator up to its epsilon. A group of equal rewards has zero advantages in all but raw.
    """
    centred_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
    group_size = reward_RG.shape[-1]
    match estimator:
        case "raw":
            return reward_RG
        case "mean-shifted":
            return np.asarray(centred_RG)
        case "normalised":
            return np.asarray(centred_RG / (reward_RG.std(axis=-1, ddof=1, keepdims=True) + STD_EPSILON))
        case "RLOO":
            return np.asarray(centred_RG * group_size / (group_size - 1))
        case "RF++-baseline":
            return np.asarray(centred_RG / np.sqrt(reward_RG.var(axis=-1, ddof=1, keepdims=True) + VARIANCE_EPSILON))


def calibrated(advantage_RG: Array, reward_RG: Array, alpha: float, form: IACForm) -> Array:
    """IAC: the advantages of correct samples times (1 - share of correct)^alpha, or literally (number wrong)^alpha.

    The paper's formula is lost; which of the two forms it has is derived from its words (normalized) or from a third
    party's notes (literal). alpha = 0 changes nothing.
    """
    wrong_R1 = (1.0 - reward_RG).sum(axis=-1, keepdims=True)
    scale = reward_RG.shape[-1] if form == "normalized" else 1.0
    return np.where(reward_RG > 0, advantage_RG * (wrong_R1 / scale) ** alpha, advantage_RG)
