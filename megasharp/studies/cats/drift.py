"""The expected drift between both correct labels, in closed form: why IAC and DLC get in each other's way.

With sampler s, policy p, S = s_cat + s_persian, and N correct samples of G with advantages a+ (the others a-), the
expected gradient of log(p_cat / p_persian), the difference of both logits, is

    1/G E_N[ w a+ N ((s_cat - s_persian) / S - (p_cat - p_persian)) - a- (G - N) (p_cat - p_persian) ]

with IAC's weight w: of N correct samples N s_cat / S are Cat on average, and a step along -log pi of a wrong label
raises each other label by its probability. Normalised advantages have a+ N = -a- (G - N) =: B, so that it is

    1/G E_N[ B (w (s_cat - s_persian) / S + (1 - w) (p_cat - p_persian)) ]

- DLC makes the first term small or negative. It also changes B ~ sqrt(S (1 - S)), as a flatter sampler is wrong more
  often: B grows where S is near 1 and falls below 1/2. Near 1, where mu does not even out both labels, it outweighs the
  first effect (`drift_by_success`).
- IAC shrinks DLC's term by w and lets in the second one, which always favours the leader. With even samples it is all
  there is: IAC with DLC then collapses in expectation, DLC alone does not.
- Raw rewards have a- = 0. Then even samples leave -w N (p_cat - p_persian), which favours the weaker label: IAC with
  DLC is stable there.
"""

from __future__ import annotations

from math import comb

import numpy as np

from megasharp.studies.cats.experiments import (
    CAT,
    CORRECT,
    GROUP_SIZE,
    PERSIAN,
    Estimator,
    advantages,
    calibrated_advantages,
)
from megasharp.studies.softmax import Floats, softmax
from megasharp.studies.study import Cell, Table

# A policy that favours Cat three to one and is right nine times in ten.
LEADING = np.array([0.675, 0.05, 0.225, 0.05])
MUS = (0.0, 0.25, 0.5, 1.0)
# Shares of correct samples, and how strongly Cat leads Persian, for the second table.
SUCCESSES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
ODDS = (1.5, 3.0, 9.0)
LITTLE = 0.2


def drift(policy_V: Floats, sampler_V: Floats, estimator: Estimator, alpha: float, group_size: int) -> float:
    """Return the expected gradient of log(p_cat / p_persian) of one group from `sampler_V`; positive favours Cat."""
    right = float(sampler_V[list(CORRECT)].sum())
    sampled = float(sampler_V[CAT] - sampler_V[PERSIAN]) / right
    leads = float(policy_V[CAT] - policy_V[PERSIAN])
    total = 0.0
    for count in range(group_size + 1):
        reward_RG = np.array([[1.0] * count + [0.0] * (group_size - count)])
        weight_G = calibrated_advantages(advantages(estimator, reward_RG), reward_RG, alpha, "normalized")[0]
        positive, negative = float(weight_G[:count].sum()), float(weight_G[count:].sum())
        chance = comb(group_size, count) * right**count * (1.0 - right) ** (group_size - count)
        total += chance * (positive * (sampled - leads) - negative * leads)
    return total / group_size


def calibrated_sampler(policy_V: Floats, mu: float) -> Floats:
    """Return DLC's sampler with a memory that is the policy itself."""
    return softmax((1.0 - mu) * np.log(policy_V))


def drift_table() -> Table:
    """Tabulate the drift at LEADING by estimator and mu, with IAC and without."""
    lines: list[tuple[Cell, ...]] = []
    names: tuple[Estimator, ...] = ("raw", "normalised")
    for estimator in names:
        for alpha in (0.0, 1.0):
            each = [drift(LEADING, calibrated_sampler(LEADING, mu), estimator, alpha, GROUP_SIZE) for mu in MUS]
            lines.append((estimator, "IAC alpha 1" if alpha else "none", *each))
    title = (
        f"expected gradient of log(p(Cat) / p(Persian)) where they are .675 and .225, G={GROUP_SIZE}, with a memory "
        "equal to the policy (positive: the leader gains)"
    )
    return Table("drift", title, ("estimator", "advantages", *(f"DLC mu {mu:g}" for mu in MUS)), tuple(lines))


def drift_by_success() -> Table:
    """Tabulate what a little DLC makes of the drift of normalised advantages, by success and by the leader's odds."""
    lines: list[tuple[Cell, ...]] = []
    for success in SUCCESSES:
        ratios = []
        for odds in ODDS:
            share = odds / (1.0 + odds)
            policy_V = np.full(LEADING.size, (1.0 - success) / (LEADING.size - len(CORRECT)))
            policy_V[CAT], policy_V[PERSIAN] = success * share, success * (1.0 - share)
            plain, calibrated = (
                drift(policy_V, calibrated_sampler(policy_V, mu), "normalised", 0.0, GROUP_SIZE) for mu in (0.0, LITTLE)
            )
            ratios.append(calibrated / plain)
        lines.append((success, *ratios))
    title = (
        f"drift with DLC at mu {LITTLE:g} over the drift without, normalised advantages, G={GROUP_SIZE}, by the share "
        "of correct samples and the odds of Cat over Persian (above 1: DLC speeds the collapse up)"
    )
    return Table("drift_by_success", title, ("correct", *(f"odds {odds:g}" for odds in ODDS)), tuple(lines))
