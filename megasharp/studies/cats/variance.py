"""Noise of one group's gradient under section 4.1's weights, exactly: every group of labels by its probability.

The group's gradient of the logits has a mean and a covariance over all groups that the policy can draw. `noise` is the
square root of the covariance's trace over the length of the mean: from 1 on, one group says little about the direction.
"""

from __future__ import annotations

from itertools import product
from math import factorial

import numpy as np

from megasharp.studies.cats.experiments import Estimator, advantages, calibrated_advantages, rewards
from megasharp.studies.cats.reweighing import Reweighing, reweigh
from megasharp.studies.claims import outcome
from megasharp.studies.softmax import Floats, policy_gradient
from megasharp.studies.study import Cell, Claim, Table

# Ours: Cat leads; Persian (correct) and Siamese (wrong) are as rare as this.
RARE = (0.05, 0.01, 0.001)
GROUP_SIZE = 8
# Advantages as they are, IAC's, and the idealised ones.
WEIGHTS: dict[str, tuple[float, Reweighing]] = {
    "none": (0.0, "none"),
    "IAC alpha 1": (1.0, "none"),
    "correct / pi": (0.0, "correct / pi"),
    "all / pi": (0.0, "all / pi"),
}
ESTIMATORS: tuple[Estimator, ...] = ("raw", "mean-shifted", "normalised")


def skewed(rare: float) -> Floats:
    """Return a policy over Cat, Dog, Persian and Siamese that is right nine times in ten, nearly always with Cat."""
    return np.array([0.9 - rare, 0.1 - rare, rare, rare])


def noise(policy_V: Floats, estimator: Estimator, alpha: float, reweighing: Reweighing, group_size: int) -> float:
    """Return the noise of one group's gradient; groups with the same counts of labels are one case."""
    labels = range(len(policy_V))
    count_NV = np.array([c for c in product(range(group_size + 1), repeat=len(policy_V)) if sum(c) == group_size])
    orders_N = [factorial(group_size) / np.prod([factorial(int(c)) for c in count_V]) for count_V in count_NV]
    chance_N = np.array(orders_N) * (policy_V**count_NV).prod(axis=-1)
    label_NG = np.array([np.repeat(labels, count_V) for count_V in count_NV])
    reward_NG = rewards(label_NG)
    weight_NG = calibrated_advantages(advantages(estimator, reward_NG), reward_NG, alpha, "normalized")
    weight_NG = weight_NG * reweigh(reweighing, reward_NG, policy_V[label_NG], alpha)
    gradient_NV = policy_gradient(np.tile(policy_V, (len(label_NG), 1)), label_NG, weight_NG)
    mean_V = chance_N @ gradient_NV
    spread = chance_N @ ((gradient_NV - mean_V) ** 2).sum(axis=-1)
    return float(np.sqrt(spread) / np.linalg.norm(mean_V))


def variance_table() -> Table:
    """Tabulate the noise by estimator, by the rare labels' probability, and by weights."""
    lines: list[tuple[Cell, ...]] = [
        (
            estimator,
            rare,
            *(noise(skewed(rare), estimator, alpha, kind, GROUP_SIZE) for alpha, kind in WEIGHTS.values()),
        )
        for estimator in ESTIMATORS
        for rare in RARE
    ]
    title = f"noise of one group's gradient over its mean, G={GROUP_SIZE}, exact"
    return Table("variance", title, ("estimator", "rare labels' p", *WEIGHTS), tuple(lines))


def variance_claim(table: Table) -> Claim:
    """Judge section 4.1's first reason against 1 / pi: more noise than with advantages as they are."""
    columns = {name: table.columns.index(name) for name in WEIGHTS}
    cases = [{name: float(row[place]) for name, place in columns.items()} for row in table.rows]
    noisier = sum(case["all / pi"] > case["none"] for case in cases)
    rarest = [case for case, row in zip(cases, table.rows, strict=True) if row[1] == RARE[-1]]
    shown = "; ".join(
        f"{estimator} {case['none']:.2f}, {case['IAC alpha 1']:.2f}, {case['all / pi']:.1f}"
        for estimator, case in zip(ESTIMATORS, rarest, strict=True)
    )
    ours = f"noisier in {noisier} of {len(cases)} cases; noise over mean at p {RARE[-1]:g} (none, IAC, 1 / pi): {shown}"
    statement = "1 / pi weights turn the variance of probabilities into unstable updates"
    return Claim("4.1", statement, "highly unstable", ours, outcome(noisier, len(cases)))
