"""Policies of the form reference * exp(exponent) / Z over finitely many modes or trajectories, in float64.

An array `x_M` holds one number per mode in its last axis; leading axes are independent cases.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]


def log_partition(reference_M: Floats, exponent_M: Floats) -> Floats:
    """log of the sum over modes of reference * exp(exponent), without overflow."""
    top = exponent_M.max(-1)
    total: Floats = np.log((reference_M * np.exp(exponent_M - top[..., None])).sum(-1)) + top
    return total


def tilt(reference_M: Floats, exponent_M: Floats) -> Floats:
    """The policy proportional to reference * exp(exponent)."""
    tilted: Floats = reference_M * np.exp(exponent_M - log_partition(reference_M, exponent_M)[..., None])
    return tilted


def kl(policy_M: Floats, reference_M: Floats) -> Floats:
    """KL(policy || reference) in nats; the reference must be positive everywhere."""
    positive_M = np.where(policy_M > 0, policy_M, 1.0)
    divergence: Floats = (policy_M * np.log(positive_M / reference_M)).sum(-1)
    return divergence
